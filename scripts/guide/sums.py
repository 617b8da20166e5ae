"""Questions with numbers in them: weights, KV cache, speed, download time, which model for a
memory, names.

Inside the table the answer is the table's; outside it the guide gives the formula and `localchat
fit`.
"""

from random import Random
from typing import Any, Final, NamedTuple

from grammar import phrase
from noise import roughen

WIDTH_SAY: Final = ("{} GB/s", "{} gb/s", "{} GB/s of bandwidth", "a bandwidth of {} GB/s")


class Sum(NamedTuple):
    """What a question with numbers was about; a short question then changes one thing of it."""

    kind: str
    subject: str
    detail: str


class Sums:
    """Questions over the tables of facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.ask: dict[str, Any] = facts["sums"]
        self.lexicon: dict[str, list[str]] = facts["lexicon"]
        self.models = [
            (f"{name}:{size}b", f"{say} {size}b")
            for name, family in facts["families"].items()
            for size in family["sizes"]
            for say in family["say"].split("|")
        ]

    def _say(self, pattern: str, rng: Random, **values: str) -> str:
        text = phrase(pattern, self.lexicon, rng)
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return " ".join(text.split())

    def draw(self, rng: Random) -> tuple[str, str, Sum]:
        """A question, its answer, and what it was about."""
        kinds = (self._weights, self._kv, self._memory, self._speed, self._download, self._named)
        return rng.choices(kinds, (5, 5, 4, 1.5, 1.5, 6))[0](rng)

    def after(self, about: Sum, rng: Random) -> tuple[str, str, Sum] | None:
        """A short question that changes one thing: "and for 8 bits?"."""
        front = rng.choice(
            [
                "and {}",
                "and {}",
                "and for {}",
                "and with {}",
                "what about {}",
                "how about {}",
                "{}",
                "and at {}",
                "ok, and {}",
                "same for {}",
            ]
        )
        if about.kind == "weights":
            if rng.random() < 0.6:
                about = about._replace(
                    detail=rng.choice([b for b in self.ask["bits"] if b != about.detail])
                )
                said = rng.choice([*self.ask["bits"][about.detail].split("|"), about.detail])
            else:
                size, said = self._size(rng)
                about = about._replace(subject=size)
            answer = self._weights_answer(about.subject, about.detail)
        elif about.kind == "kv":
            tokens, kind = about.detail.split("/")
            draw = rng.random()
            if draw < 0.6:
                tokens = rng.choice(self._kv_tokens())
                said = self._tokens(int(tokens), rng)
                about = about._replace(detail=f"{tokens}/{kind}")
            elif draw < 0.8:
                kind = rng.choice(("q8_0", "q4_0", "f16"))
                said = rng.choice((f"{kind}", f"{kind} kv", f"a {kind} cache"))
                about = about._replace(detail=f"{tokens}/{kind}")
            else:
                about = about._replace(subject=rng.choice(list(self.facts["kv"])))
                said = self._shape(about.subject, rng)
            answer = self._kv_answer(about)
        elif about.kind == "memory":
            about = about._replace(subject=rng.choice(list(self.facts["memory"])))
            said = rng.choice(self.ask["memory_say"]).format(about.subject)
            answer = self.facts["memory"][about.subject]
        elif about.kind == "named":
            verb = rng.choice(list(self.ask["named"]))
            pattern, shape = self.ask["named"][verb]["ask"], self.ask["named"][verb]["answer"]
            front, said = (
                rng.choice(["and how do i {}", "and {}", "how do i {} then", "and to {}"]),
                "",
            )
            it = rng.choice(("it", "it", "this model", "that one"))
            said = self._say(f"({pattern})", rng, m=it)
            answer, about = shape.replace("{v}", about.subject), about._replace(detail=verb)
        else:
            return None
        return roughen(front.format(said), rng, dress=False), answer, about

    def _size(self, rng: Random) -> tuple[str, str]:
        sizes = sorted({key.split("/")[0] for key in self.facts["weights"]}, key=float)
        size = rng.choice(sizes)
        if rng.random() < 0.25:
            size = rng.choice(
                (str(rng.randint(5, 400)), f"{rng.randint(0, 60)}.{rng.randint(1, 9)}")
            )
        return size, rng.choice(
            (f"{size}b", f"{size}B", f"{size} b", f"{size} billion", f"{size}b", f"{size}B")
        )

    def _weights_answer(self, size: str, bits: str) -> str:
        gb = self.facts["weights"].get(f"{size}/{bits}")
        if gb:
            more = (
                " A Q4_K_M file is somewhat larger, with about 4.85 bits per weight."
                if bits == "4"
                else ""
            )
            return f"{gb}: {size} billion × {bits} / 8.{more}"
        return (
            f"Compute {size} × {bits} / 8 gigabytes: parameters in billions × bits / 8. "
            "That sum is not in my table; `localchat fit MODEL` gives the exact figure."
        )

    def _weights(self, rng: Random) -> tuple[str, str, Sum]:
        size, said = self._size(rng)
        bits = rng.choice(list(self.ask["bits"]))
        text = self._say(
            rng.choice(self.ask["weights"]),
            rng,
            s=said,
            b=rng.choice(self.ask["bits"][bits].split("|")),
        )
        if said.endswith("billion") and rng.random() < 0.5:
            text = text.replace("billion", "billion parameter", 1).replace(
                "parameter parameters", "parameters"
            )
        return roughen(text, rng), self._weights_answer(size, bits), Sum("weights", size, bits)

    def _kv_tokens(self) -> list[str]:
        return list(next(iter(self.facts["kv"].values()))["totals"]["f16"])

    @staticmethod
    def _tokens(n: int, rng: Random) -> str:
        said = rng.choice((f"{n}", f"{n:,}", f"{n // 1024}k", f"{n // 1024}K"))
        return said + rng.choice((" tokens", " tokens", "", " context", " tokens of context"))

    @staticmethod
    def _shape(name: str, rng: Random) -> str:
        plain = (
            name.lower().replace("-", " ").replace("qwen2.5", rng.choice(("qwen2.5", "qwen 2.5")))
        )
        return rng.choice(
            (name, plain, plain, plain.replace("llama 3", "llama3"), plain.replace(" ", "-"))
        )

    def _kv_answer(self, about: Sum) -> str:
        row = self.facts["kv"][about.subject]
        tokens, kind = about.detail.split("/")
        if tokens == "1":
            each, product = row["per_token"], row["product"]
            return f"{about.subject} needs {each} of KV cache per token at f16: {product}."
        total = row["totals"][kind].get(tokens)
        if total:
            tail = (
                f" Per token it is {row['per_token']}: {row['product']}." if kind == "f16" else ""
            )
            need = f"{about.subject} needs {total} of KV cache"
            return f"{need} for {int(tokens):,} tokens at {kind}.{tail}"
        return (
            f"{about.subject} needs {row['per_token']} per token at f16; multiply by the tokens. "
            f"`localchat fit MODEL --ctx {tokens}` does the sum."
        )

    def _kv(self, rng: Random) -> tuple[str, str, Sum]:
        if rng.random() < 0.12:
            return self._kv_of_shape(rng)
        name = rng.choice(list(self.facts["kv"]))
        said = self._shape(name, rng)
        if rng.random() < 0.3:
            text = self._say(rng.choice(self.ask["kv_token"]), rng, m=said)
            about = Sum("kv", name, "1/f16")
            return roughen(text, rng), self._kv_answer(about), about
        kind, word = "f16", ""
        if rng.random() < 0.2:
            kind = rng.choice(("q8_0", "q4_0"))
            word = rng.choice((f" with {kind}", f" in {kind}", f" {kind}"))
        tokens = rng.choice(self._kv_tokens())
        if kind == "f16" and rng.random() < 0.15:
            tokens = str(rng.choice((rng.randint(100, 99999), 1000 * rng.randint(1, 120))))
        shown = (
            self._tokens(int(tokens), rng) if tokens in self._kv_tokens() else f"{tokens} tokens"
        )
        text = self._say(rng.choice(self.ask["kv"]), rng, m=said, t=shown, k=word)
        about = Sum("kv", name, f"{tokens}/{kind}")
        return roughen(text, rng), self._kv_answer(about), about

    def _kv_of_shape(self, rng: Random) -> tuple[str, str, Sum]:
        layers, heads = str(rng.randint(4, 128)), str(rng.choice((1, 2, 4, 8, 12, 16, 32)))
        dim = str(rng.choice((64, 80, 96, 128, 192, 256)))
        shown = self._tokens(int(rng.choice(self._kv_tokens())), rng)
        text = self._say(rng.choice(self.ask["kv_shape"]), rng, l=layers, h=heads, d=dim, t=shown)
        answer = (
            f"2 × {layers} × {heads} × {dim} × 2 bytes per token at f16, times the tokens. "
            "That product is not in my table; `localchat fit MODEL` does the sum."
        )
        return roughen(text, rng), answer, Sum("shape", layers, heads)

    def _memory(self, rng: Random) -> tuple[str, str, Sum]:
        gb = rng.choice(list(self.facts["memory"]))
        text = self._say(
            rng.choice(self.ask["memory"]), rng, g=rng.choice(self.ask["memory_say"]).format(gb)
        )
        if rng.random() < 0.1:
            other = str(rng.choice((1, 2, 3, 5, 7, 11, 18, 20, 22, 36, 40, 96, 100, 128, 141, 192)))
            text = text.replace(gb, other)
            answer = (
                f"{other} GB is not in my table. Weights at Q4_K_M are about 0.6 GB per billion "
                "parameters, "
                "and the KV cache needs room too; `localchat fit MODEL` gives the verdict."
            )
            return roughen(text, rng), answer, Sum("memory", other, "")
        return roughen(text, rng), self.facts["memory"][gb], Sum("memory", gb, "")

    def _speed(self, rng: Random) -> tuple[str, str, Sum]:
        key = rng.choice(list(self.facts["speeds"]))
        size, width = key.split("/")
        if rng.random() < 0.2:
            size, width = f"{rng.randint(2, 60)}.{rng.randint(1, 9)}", str(rng.randint(10, 4000))
        value = self.facts["speeds"].get(f"{size}/{width}")
        text = self._say(
            rng.choice(self.ask["speed"]), rng,
            f=rng.choice((f"{size} GB", f"{size}gb", f"{size} gb")),
            w=rng.choice(WIDTH_SAY).format(width),
        )  # fmt: skip
        if value:
            why = "since each token reads all weights once"
            answer = f"At most about {value} tok/s: {width} / {size}, {why}."
        else:
            answer = (
                f"Divide: {width} / {size} tok/s at most, bandwidth over the bytes of the weights. "
                "That sum is not in my table; "
                "`localchat fit MODEL` expects a speed for this machine."
            )
        return roughen(text, rng), answer, Sum("speed", size, width)

    def _download(self, rng: Random) -> tuple[str, str, Sum]:
        key = rng.choice(list(self.facts["downloads"]))
        size, line = key.split("/")
        wide = [f"{line} Mbit/s", f"{line} mbit/s", f"{line} mbit", f"{line} mbps"]
        if line == "1000":
            wide += ["1 Gbit/s", "1 gbit/s", "a gigabit"]
        text = self._say(
            rng.choice(self.ask["download"]), rng, w=rng.choice(wide),
            f=rng.choice((f"{size} GB", f"{size}gb", f"{size} gb", f"{size} gigabytes")),
        )  # fmt: skip
        return (
            roughen(text, rng),
            f"About {self.facts['downloads'][key]}.",
            Sum("download", size, line),
        )

    def _named(self, rng: Random) -> tuple[str, str, Sum]:
        value, said = rng.choice(self.models)
        said = rng.choice(
            (
                said,
                said,
                value,
                said.replace(" ", "-"),
                said.replace("b", "B") if rng.random() < 0.3 else said,
            )
        )
        if rng.random() < 0.2:
            value += "-q4_k_m"
            said += rng.choice((" q4_k_m", " Q4_K_M", "-q4_k_m", " in q4_k_m"))
        if rng.random() < 0.2:
            text = self._say(rng.choice(self.ask["fit"]), rng, m=said)
            answer, verb = (
                f"Ask `localchat fit {value}`: it says whether it fits, and how fast it will be.",
                "fit",
            )
        else:
            verb = rng.choices(list(self.ask["named"]), (6, 3, 2, 2, 1, 1, 1))[0]
            pattern, shape = self.ask["named"][verb]["ask"], self.ask["named"][verb]["answer"]
            text = rng.choice(self.ask["named_frames"]).format(
                self._say(f"({pattern})", rng, m=said)
            )
            answer = shape.replace("{v}", value)
        return roughen(text, rng), answer, Sum("named", value, verb)
