"""Variants: combinations of values, and errors for wrong ones."""

import pytest

from localchat.config.settings import Given, convert
from localchat.errors import UsageError
from localchat.measure.variants import parse_vary, setting_text, variants


def test_values_beside_each_other_make_every_combination() -> None:
    varied = parse_vary(["kv-type=f16,q8_0", "speculation=on,off"])
    found = variants(("m",), varied, None)
    assert [one.name for one in found] == [
        *("kv-type=f16 speculation=true", "kv-type=f16 speculation=false"),
        *("kv-type=q8_0 speculation=true", "kv-type=q8_0 speculation=false"),
    ]
    assert found[3].settings == {"kv_cache_type": "q8_0", "speculation": "false"}
    slots = variants(("m", "n"), parse_vary(["parallel=4,8"]), 16)
    assert [(one.name, one.parallel, one.settings) for one in slots[:2]] == [
        ("m parallel=4", 4, {}),
        ("m parallel=8", 8, {}),
    ]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("kv-typ=f16,q8_0", "'kv-typ' is not a setting"),
        ("theme=dark,light", "'theme' is not a setting"),
        ("threads=4", "two values or more"),
        ("threads=4,many", "threads must be"),
        ("parallel=4,0", "from 1 to 255"),
        ("kv-type", "two values or more"),
    ],
)
def test_wrong_values_are_refused_by_name(word: str, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_vary([word])
    assert found in caught.value.message


def test_settings_of_a_running_server_cannot_be_varied() -> None:
    with pytest.raises(UsageError, match="runs already"):
        variants(("http://127.0.0.1:1",), parse_vary(["threads=1,2"]), None)
    with pytest.raises(UsageError, match="named twice"):
        variants(("m", "m"), {}, None)


def test_the_text_of_a_list_is_read_as_the_same_list() -> None:
    adapters = ["a.gguf:0.5", "b, c.gguf"]
    text = setting_text(adapters)
    assert convert("lora", Given(text, "LOCALCHAT_LORA")) == tuple(adapters)
