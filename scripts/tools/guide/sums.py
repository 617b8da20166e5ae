"""Questions with numbers: weights, KV cache, speed, download time, models by memory, names.

Within the table the answer is the table's; beyond it the guide gives the formula and `localchat fit`.
"""

from random import Random
from typing import Any

from grammar import phrase
from noise import roughen
from rates import Rates, Sum


class Sums:
    """Draws questions over the tables of facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.ask: dict[str, Any] = facts["sums"]
        self.lexicon: dict[str, list[str]] = facts["lexicon"]
        self.rates = Rates(facts)
        self.models = [
            (f"{name}:{size}b", f"{say} {size}b")
            for name, family in facts["families"].items()
            for size in family["sizes"]
            for say in family["say"].split("|")
        ]
        self.models += [
            (name, f"{say} {name.partition(':')[2]}")
            for says, names in facts["bare"].items()
            for name in names
            for say in says.split("|")
        ]

    def _say(self, pattern: str, rng: Random, **values: str) -> str:
        text = phrase(pattern, self.lexicon, rng)
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return " ".join(text.split())

    def draw(self, rng: Random, kind: str = "") -> tuple[str, str, Sum]:
        """A question, its answer, and its subject. kind: one of those below; empty: any."""
        kinds = {
            "weights": self._weights, "kv": self._kv, "memory": self._memory, "rates": self.rates.draw,
            "named": self._named, "card": self._card,
        }  # fmt: skip
        kind = kind or rng.choices(list(kinds), (5, 5.5, 4, 5, 5, 0.6))[0]
        return kinds[kind](rng)

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
            about, said, answer = self._memory_after(about, rng)
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
        elif about.kind == "speed":
            about, said, answer = self.rates.after(about, rng)
        else:
            return None
        if said in self.ask["why"]:
            front = "{}"
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
        if rng.random() < 0.1:
            return self._file(rng)
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

    def _file(self, rng: Random) -> tuple[str, str, Sum]:
        """The size of a model if the question names no bits."""
        name, gb = rng.choice(list(self.facts["files"].items()))
        size = name.removesuffix("b")
        text = self._say(rng.choice(self.ask["file_size"]), rng, s=rng.choice((name, name.upper())))
        full = self.facts["weights"][f"{size}/16"]
        answer = f"{gb:g} GB at Q4_K_M, and {full} at 16 bits ({size} billion × 16 / 8)."
        return roughen(text, rng), answer, Sum("weights", size, "4")

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
        if rng.random() < 0.25:
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
        """A model described by its shape instead of a name; the usual shapes are in the table."""
        key = rng.choice(list(self.facts["shapes"]))
        if rng.random() < 0.4:
            key = rng.choice([row["shape"] for row in self.facts["kv"].values()])
        elif rng.random() < 0.2:
            key = f"{rng.randint(5, 127)}/{rng.choice((3, 5, 6, 10, 12, 24))}/{rng.choice((80, 112, 192))}"
        layers, heads, dim = key.split("/")
        tokens = rng.choice(self._kv_tokens())
        shown = self._tokens(int(tokens), rng)
        pattern = rng.choice(self.ask["kv_shape"])
        text = self._say(pattern, rng, l=layers, h=heads, d=dim, t=shown)
        product = f"2 × {layers} × {heads} × {dim} × 2 bytes"
        row = self.facts["shapes"].get(key)
        if row is None:
            answer = (
                f"{product} per token at f16, times the tokens. "
                "That product is not in my table; `localchat fit MODEL` does the sum."
            )
        elif shown in text:
            answer = f"{product} = {row['token']} per token at f16, "
            answer += f"so {int(tokens):,} tokens take {row[tokens]}."
        else:
            answer = f"{product} = {row['token']} per token at f16; multiply by the tokens."
        return roughen(text, rng), answer, Sum("shape", key, tokens)

    def _memory(self, rng: Random) -> tuple[str, str, Sum]:
        if rng.random() < 0.3:
            return self._card(rng) if rng.random() < 0.5 else self._size_fits(rng)
        gb = rng.choice(list(self.facts["memory"]))
        for_code = rng.random() < 0.15
        text = self._say(
            rng.choice(self.ask["coding" if for_code else "memory"]),
            rng,
            g=rng.choice(self.ask["memory_say"]).format(gb),
        )
        if for_code:
            return roughen(text, rng), self.facts["coding"][gb], Sum("memory", gb, "code")
        if rng.random() < 0.1:
            other = str(rng.choice((1, 3, 5, 7, 9, 14, 22, 28, 30, 60, 100, 141, 192)))
            text = text.replace(gb, other)
            answer = (
                f"{other} GB is not in my table. Weights at Q4_K_M are about 0.6 GB per billion "
                "parameters, "
                "and the KV cache needs room too; `localchat fit MODEL` gives the verdict."
            )
            return roughen(text, rng), answer, Sum("memory", other, "")
        return roughen(text, rng), self.facts["memory"][gb], Sum("memory", gb, "")

    def _size_fits(self, rng: Random) -> tuple[str, str, Sum]:
        """Whether so many billion parameters fit in so many gigabytes."""
        key = rng.choice(list(self.facts["size_fits"]))
        name, gb = key.split("/")
        said = rng.choice((name, name.upper(), f"{name} model", f"{name} q4_k_m", f"{name} 4 bit"))
        memory = rng.choice(
            (f"{gb} GB", f"{gb}gb", f"{gb} gb", f"{gb}GB", f"{gb} GB of ram", f"{gb} gb vram")
        )
        text = self._say(rng.choice(self.ask["size_fits"]), rng, s=said, g=memory)
        return roughen(text, rng), self.facts["size_fits"][key], Sum("memory", gb, "")

    def _memory_after(self, about: Sum, rng: Random) -> tuple[Sum, str, str]:
        """Another memory size, the same for code, or why."""
        draw = rng.random()
        if draw < 0.15:
            why = rng.choice(self.ask["why"])
            return (
                about,
                why,
                (
                    "The weights must fit with room for the KV cache: at Q4_K_M about 0.6 GB per billion "
                    "parameters. `localchat fit MODEL` checks any other one."
                ),
            )
        if draw < 0.3 and about.subject in self.facts["coding"]:
            said = rng.choice(("code", "coding", "programming", "writing code"))
            return about._replace(detail="code"), said, self.facts["coding"][about.subject]
        about = about._replace(subject=rng.choice(list(self.facts["memory"])))
        said = rng.choice(self.ask["memory_say"]).format(about.subject)
        table = self.facts["coding" if about.detail == "code" else "memory"]
        return about, said, table[about.subject]

    def _card(self, rng: Random) -> tuple[str, str, Sum]:
        """A graphics card or a Mac by its name."""
        if rng.random() < 0.5:
            return self._card_of_several(rng)
        card, gb = rng.choice(list(self.facts["cards"].items()))
        said = rng.choice(
            (card, card.lower(), card.lower().replace(" ", ""), card.split(" ", 1)[-1])
        )
        text = self._say(rng.choice(self.ask["cards"]), rng, c=said)
        answer = f"{'An' if card[0] in 'RLHA' else 'A'} {card} has {gb} GB. {self.facts['memory'][str(gb)]}"
        return roughen(text, rng), answer, Sum("memory", str(gb), "")

    def _card_of_several(self, rng: Random) -> tuple[str, str, Sum]:
        """A card sold with several memory sizes: the question names one, or the guide asks which."""
        card, sizes = rng.choice(list(self.facts["cards_of_several"].items()))
        said, gb = rng.choice((card, card.lower(), card.lower())), str(rng.choice(sizes))
        if rng.random() < 0.75:
            form = rng.choice(
                ("{c} {g}gb", "{c} {g} gb", "{c} with {g} GB", "{c} ({g} GB)", "{g}gb {c}")
            )
            said, answer = form.format(c=said, g=gb), self.facts["memory"][gb]
        else:
            some = ", ".join(map(str, sizes[:-1]))
            answer = f"There are several {card}, with {some} and {sizes[-1]} GB: which one is it? "
            answer += "`localchat fit MODEL` measures the memory of this machine."
        text = self._say(rng.choice(self.ask["cards"]), rng, c=said)
        return roughen(text, rng), answer, Sum("memory", gb, "")

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
            memory = rng.choice(self.ask["memory_say"]).format(
                rng.choice((4, 6, 8, 12, 16, 24, 32, 48))
            )
            text = self._say(rng.choice(self.ask["fit"]), rng, m=said, g=memory)
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
