"""Adapters as the command line and the settings name them."""

from pathlib import Path

import pytest

from localchat.config.settings import Given, resolve
from localchat.errors import ModelMissing, UsageError
from localchat.fit.load_options import LoraAdapter
from localchat.models.resolve import parse_adapter


def test_a_scale_follows_a_colon_unless_the_name_itself_has_one(tmp_path: Path) -> None:
    plain = tmp_path / "style.gguf"
    odd = tmp_path / "style:2"
    plain.touch()
    odd.mkdir()
    assert parse_adapter(str(plain)) == LoraAdapter(str(plain), 1.0)
    assert parse_adapter(f"{plain}:0.5") == LoraAdapter(str(plain), 0.5)
    assert parse_adapter(f"{plain}:-1e-1") == LoraAdapter(str(plain), -0.1)
    assert parse_adapter(str(odd)) == LoraAdapter(str(odd), 1.0)
    assert [parse_adapter(text).label for text in (str(plain), f"{plain}:0.50")] == [
        *("style.gguf", "style.gguf:0.5")
    ]
    for text in f"{plain}:nan", f"{plain}:-inf", f"{plain}:1e39":
        with pytest.raises(UsageError, match="scale"):
            parse_adapter(text)
    for text in f"{plain}:x", str(tmp_path / "nothing"):
        with pytest.raises(ModelMissing, match="--lora"):
            parse_adapter(text)


@pytest.mark.parametrize("value", [["a", "b:2"], '["a", "b:2"]'])
def test_the_setting_is_a_list_of_texts(value: object) -> None:
    assert resolve({"lora": Given(value, "")}).settings.lora == ("a", "b:2")
    assert resolve({"lora": Given("a", "")}).settings.lora == ("a",)
    for bad in [""], [3], ["a"] * 17:
        with pytest.raises(UsageError, match="lora"):
            resolve({"lora": Given(bad, "")})
