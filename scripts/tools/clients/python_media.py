"""Sends a picture through each installed library for Python: openai (chat, Responses), anthropic, ollama.

The same picture and question must give the same text over every protocol.
"""

import base64
import importlib
import struct
import sys
import zlib
from importlib.util import find_spec
from typing import Any

BASE = sys.argv[1]
QUESTION = "What is this?"


def png() -> bytes:
    """Return a picture of 64 x 64 pixels, half red and half blue."""
    row = b"\0" + b"\xff\0\0" * 32 + b"\0\0\xff" * 32
    header = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(row * 64)),
            (b"IEND", b""),
        )
    )


DATA = base64.b64encode(png()).decode()
URL = f"data:image/png;base64,{DATA}"


def openai_chat() -> str:
    client: Any = importlib.import_module("openai").OpenAI(base_url=BASE, api_key="none")
    content = [
        {"type": "text", "text": QUESTION},
        {"type": "image_url", "image_url": {"url": URL}},
    ]
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=12,
    )
    return str(answer.choices[0].message.content)


def openai_responses() -> str:
    client: Any = importlib.import_module("openai").OpenAI(base_url=BASE, api_key="none")
    content = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    asked = [{"role": "user", "content": content}]
    answer = client.responses.create(model="m", input=asked, temperature=0, max_output_tokens=12)
    return str(answer.output_text)


def anthropic_messages() -> str:
    client: Any = importlib.import_module("anthropic").Anthropic(
        base_url=BASE.removesuffix("/v1"), api_key="none"
    )
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    answer = client.messages.create(
        model="m",
        messages=[{"role": "user", "content": content}],
        max_tokens=12,
        extra_body={"temperature": 0},  # newer versions have no argument for it
    )
    return str(answer.content[0].text)


def ollama_chat() -> str:
    client: Any = importlib.import_module("ollama").Client(BASE.removesuffix("/v1"))
    model = client.list().models[0].model
    answer = client.chat(
        model=model,
        messages=[{"role": "user", "content": QUESTION, "images": [png()]}],
        options={"temperature": 0, "num_predict": 12},
    )
    return str(answer.message.content)


CLIENTS = {
    "openai": (openai_chat, openai_responses),
    "anthropic": (anthropic_messages,),
    "ollama": (ollama_chat,),
}


def main() -> None:
    texts: dict[str, str] = {}
    for library, checks in CLIENTS.items():
        if find_spec(library) is None:
            continue
        for check in checks:
            texts[check.__name__] = check()
            print(f"{check.__name__}: {texts[check.__name__]!r}")
    assert texts, "no client is installed"
    assert all(texts.values()), "an answer is empty"
    # Ollama's text may differ: it puts the pictures before the question.
    ordered = {text for name, text in texts.items() if name != "ollama_chat"}
    assert len(ordered) == 1, ordered


main()
