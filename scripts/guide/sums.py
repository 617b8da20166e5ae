"""Questions with numbers in them: weights, KV cache, speed, download time, which model for a memory, names.

Inside the table the answer is the table's; outside it the guide gives the formula and `localchat fit`.
"""

from random import Random
from typing import Any, Final, NamedTuple

from grammar import phrase
from noise import roughen

BITS: Final = {
    "16": "16 bits|16 bit|16-bit|fp16|bf16|f16|half precision|16bit|float16|bfloat16|full 16 bit precision",
    "8": "8 bits|8 bit|8-bit|int8|q8_0|q8|8bit|fp8|eight bits",
    "4": "4 bits|4 bit|4-bit|int4|q4|4bit|four bits|awq|4-bit quantization",
}
WEIGHTS_ASK: Final = (
    "how much memory do the weights of a {s} model (need|take|use|occupy) (at|with|in) {b}",
    "how (large|big) (is|are) (a|the weights of a) {s} (model|network|) (at|with|in) {b}",
    "(memory|size|vram|ram|gigabytes|gb) (for|of) (a|) {s} (model|parameters|weights|) (at|in|with) {b}",
    "{s} (at|in|with|) {b}, how (much memory|many gigabytes|big|large|many gb|much vram)",
    "{s} {b} (memory|size|vram|weights|gb|how big|how large|how much)",
    "how (many gigabytes|many gb|much memory|much vram|much ram|much space) (does|do|for) (a|) {s} (model|parameters|network|llm|) (need|take|use|have|) (at|in|with) {b}",
    "what does a {s} (model|network) (weigh|need|take) (at|in|with) {b}",
    "{b} weights of a {s} (model|network|llm)(: how big|, how many gb|, how much memory|)",
    "how much (vram|memory|ram) for (a|) {b} {s} (model|)",
    "weight memory of (a|) {s} (model|) (at|in|with|) {b}",
    "(calculate|compute|work out|what is|give me) the (weight memory|size|memory of the weights|memory) (of|for) (a|) {s} (model|) (at|with|in) {b}",
    "a (network|model|llm) (of|with) {s} parameters (at|in|with) {b}(, how big is it|: memory|, how much memory|)",
    "how do i (work out|calculate|compute|get) the (weight memory|memory|size) (for|of) {s} (parameters|) (at|in|with) {b}",
)
KV_ASK: Final = (
    "(kv cache|kv|kv memory|cache) (of|for) {m} (at|with|for) {t}{k}",
    "how (large|big) is the (kv cache|kv|cache) of {m} (at|with|for) {t}{k}",
    "how much (memory|vram|ram|space) does the (kv cache|kv|cache) of {m} (need|take|use) (at|with|for) {t}{k}",
    "{m} {t} (kv cache|kv|kv memory|kv size){k}",
    "{m}: (kv cache|kv|size of the cache) (at|for|with) {t}{k}",
    "how (many gigabytes|many gb|much kv memory) (does|do) {t} (take|need|cost) (with|on|for|in) {m}{k}",
    "(size|memory) of (the|) (kv cache|kv) (of|for) {m} (at|with|for) {t}{k}",
    "(what does|how much does) a context of {t} (cost|need|take) (with|on|for) {m}{k}",
)
KV_TOKEN_ASK: Final = (
    "how (many bytes|much memory|much kv|much kv cache) (per token|for each token|does one token|for one token) (does|for|of|in|need|take) (the (cache|kv cache) of|) {m} (need|take|have|)",
    "(kv cache|kv|cache) (bytes|size|memory) per token (of|for) {m}",
    "(bytes|kv|kv bytes|kv memory|memory) per token {m}",
    "(kv cache|kv) (of|for) {m}",
    "{m} (kv per token|bytes per token|kv cache|kv cache size|kv size)",
    "how (large|big) is the (kv cache|kv) of {m} per token",
    "how many (bytes|kib) (per token|a token) does {m} (need|use|take)",
    "what does one token (cost|need|take) in the (cache|kv cache) of {m}",
)
KV_SHAPE_ASK: Final = (
    "(kv cache|kv|kv bytes|kv memory) (of|for) a model with {l} layers(,| and) {h} kv heads (of|and head dimension|and head_dim) {d}( at {t}|)",
    "how (large|big) is the (kv cache|kv) (with|for) {l} layers, {h} kv heads(,| and) (head_dim|head dim|head dimension) {d}( and {t}|)",
    "(compute|calculate) the kv cache: {l} layers, {h} kv heads, head_dim {d}(, {t}|)",
    "{l} layers, {h} (kv heads|key value heads) (of|with) {d}(: kv cache|: bytes per token|, how much kv|: kv size)",
    "my model has {l} layers and {h} kv heads (of|with head_dim) {d}(: how large is the kv cache|, how much kv memory)",
)
MEMORY_ASK: Final = (
    "(which|what) (model|llm) (for|fits|with|on|in|runs on|can i run on|should i take for|would you take for|do you recommend for|is best for|works with|is good for) {g}",
    "(best|good|recommended|largest|biggest) (model|llm) (for|with|on) (a|an|) {g}",
    "(i have|i only have|i got|we have|my card has|my gpu has|my laptop has|there is|mine has) {g}(,|:|) (what|which) (model|llm|) (can i run|should i take|fits|do you recommend|can i use|is best|would you take|works|now)",
    "(recommend|suggest|propose|name) (me|) (a model|something|an llm|one model) (for|with) {g}",
    "{g}(:|,|) (what|which) (model|llm) (fits|should i take|is best|can i run|do you suggest|)",
    "{g} (model|llm|recommendation|what model|which model|best model)",
    "what (can i|could i|do i) run (on|with|in) {g}",
    "model for {g}",
    "(with|for|on) {g}(,|) (which|what) model",
    "what (do you (suggest|recommend)|should i take|fits|is good) (for|with|on|in) {g}",
    "(two|2|both) (cards|gpus)(, | with |) {g} (in total|together|altogether)(, |: |) (what|which model) (fits|do you suggest|should i take|can i run)",
)
MEMORY_SAY: Final = [
    "{} GB",
    "{} gb",
    "{}GB",
    "{}gb",
    "{} gigabytes",
    "a {} gb card",
    "a {} GB gpu",
    "{} GB of vram",
    "{} gb vram",
    "{} GB of memory",
    "{} gb ram",
    "a {}gb graphics card",
    "a card with {} GB",
    "a gpu with {} gb",
    "a {} gb graphics card",
    "{} GB of gpu memory",
    "{} gigs",
    "a machine with {} GB",
    "a laptop with {} gb",
    "{} gb of video memory",
    "a mac with {} GB",
    "a {}gb gpu",
    "a {} gig card",
    "a computer with {} gb",
    "{} GB of ram",
]
SPEED_ASK: Final = (
    "how fast (can|is|will|would) a {f} (model|file|gguf) (be|run|) (at|with|on) {w}",
    "(tok/s|tokens per second|speed|decode speed|token rate) (of|for) a {f} (model|file|) (at|with|on) {w}",
    "{f} (model|file|of weights|) (at|with|and|on) {w}(: tok/s|, how many tok/s|, how fast|: how many tokens per second)",
    "how many (tokens per second|tok/s) (does|do|can|from) a {f} (model|file) (make|reach|give|get|do|) (at|with|on) {w}",
    "(upper limit|limit|bound|maximum|roofline) (of|for) (the decode speed of|) {f} (of weights|) (at|with|on) {w}",
)
DOWNLOAD_ASK: Final = (
    "how long (does|will|would) (a download of {f}|a {f} download|downloading {f}|{f}|pulling {f}) take (with|at|on|over) (a|) {w} (line|connection|)",
    "(download time|time to download|time) (of|for) {f} (at|with|on) {w}",
    "{f} (at|over|with) {w}(: how long|, how long does it take|, download time)",
    "how (many minutes|much time) (for|to download|does it take to download) {f} (at|with|on|over) {w}",
)
NAMED: Final = {
    "pull": (
        "<get> {m}|{m} <get>|(i want|i need|give me) {m}|(command|how) to <get> {m}|get me {m}|pull {m} (for me|)",
        "`localchat pull {v}`",
    ),
    "run": (
        "(run|start|use|chat with|talk to|launch|try) {m}|(start a chat|chat) with {m}",
        "`localchat run {v}`",
    ),
    "fit": (
        "(see|check|know|find out) (if|whether) {m} (fits|runs|will run|works|will fit) (on my <machine>|here|in my <vram>|)",
        "`localchat fit {v}`",
    ),
    "rm": ("<del> {m}|<del> {m} (again|from (my|the) disk)", "`localchat rm {v}`"),
    "show": (
        "<see> (details|the template|the details|information|info) (of|about) {m}|inspect {m}",
        "`localchat show {v}`",
    ),
    "serve": (
        "serve {m}|(start|run) (a|the) <server> (with|for) {m}|offer {m} (over the api|as an api|on the network)",
        "`localchat serve {v}`",
    ),
    "stop": ("(unload|stop|eject|free) {m} (from memory|)", "`localchat stop {v}`"),
}
NAMED_FRAMES: Final = [
    "how do i {}",
    "how can i {}",
    "how to {}",
    "{}",
    "{}",
    "i want to {}",
    "what is the command to {}",
    "can i {}",
    "command to {}",
    "please {}",
    "which command to {}",
    "i would like to {}",
    "what do i type to {}",
    "tell me how to {}",
]
FIT_ASK: Final = (
    "(does|will|would|can) {m} (fit|run|work) (on my <machine>|here|on my <gpu>|in my <vram>|on this <machine>|)",
    "(can|could) my (<machine>|<gpu>) (run|handle|take) {m}",
    "is my (<machine>|<gpu>) (big|good|strong) enough for {m}",
)


class Sum(NamedTuple):
    """What a question with numbers was about, so that a short question can change one thing of it."""

    kind: str
    subject: str
    detail: str


class Sums:
    """Questions over the tables of facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
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
                about = about._replace(detail=rng.choice([b for b in BITS if b != about.detail]))
                said = rng.choice([*BITS[about.detail].split("|"), about.detail])
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
            said = rng.choice(MEMORY_SAY).format(about.subject)
            answer = self.facts["memory"][about.subject]
        elif about.kind == "named":
            verb = rng.choice(list(NAMED))
            pattern, shape = NAMED[verb]
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
        bits = rng.choice(list(BITS))
        text = self._say(rng.choice(WEIGHTS_ASK), rng, s=said, b=rng.choice(BITS[bits].split("|")))
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
            return f"{about.subject} needs {row['per_token']} of KV cache per token at f16: {row['product']}."
        total = row["totals"][kind].get(tokens)
        if total:
            tail = (
                f" Per token it is {row['per_token']}: {row['product']}." if kind == "f16" else ""
            )
            return f"{about.subject} needs {total} of KV cache for {int(tokens):,} tokens at {kind}.{tail}"
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
            text = self._say(rng.choice(KV_TOKEN_ASK), rng, m=said)
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
        text = self._say(rng.choice(KV_ASK), rng, m=said, t=shown, k=word)
        about = Sum("kv", name, f"{tokens}/{kind}")
        return roughen(text, rng), self._kv_answer(about), about

    def _kv_of_shape(self, rng: Random) -> tuple[str, str, Sum]:
        layers, heads = str(rng.randint(4, 128)), str(rng.choice((1, 2, 4, 8, 12, 16, 32)))
        dim = str(rng.choice((64, 80, 96, 128, 192, 256)))
        shown = self._tokens(int(rng.choice(self._kv_tokens())), rng)
        text = self._say(rng.choice(KV_SHAPE_ASK), rng, l=layers, h=heads, d=dim, t=shown)
        answer = (
            f"2 × {layers} × {heads} × {dim} × 2 bytes per token at f16, times the tokens. "
            "That product is not in my table; `localchat fit MODEL` does the sum."
        )
        return roughen(text, rng), answer, Sum("shape", layers, heads)

    def _memory(self, rng: Random) -> tuple[str, str, Sum]:
        gb = rng.choice(list(self.facts["memory"]))
        text = self._say(rng.choice(MEMORY_ASK), rng, g=rng.choice(MEMORY_SAY).format(gb))
        if rng.random() < 0.1:
            other = str(rng.choice((1, 2, 3, 5, 7, 11, 18, 20, 22, 36, 40, 96, 100, 128, 141, 192)))
            text = text.replace(gb, other)
            answer = (
                f"{other} GB is not in my table. Weights at Q4_K_M are about 0.6 GB per billion parameters, "
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
            rng.choice(SPEED_ASK), rng,
            f=rng.choice((f"{size} GB", f"{size}gb", f"{size} gb")),
            w=rng.choice((f"{width} GB/s", f"{width} gb/s", f"{width} GB/s of bandwidth", f"a bandwidth of {width} GB/s")),
        )  # fmt: skip
        if value:
            answer = f"At most about {value} tok/s: {width} / {size}, since each token reads all weights once."
        else:
            answer = (
                f"Divide: {width} / {size} tok/s at most, bandwidth over the bytes of the weights. "
                "That sum is not in my table; `localchat fit MODEL` expects a speed for this machine."
            )
        return roughen(text, rng), answer, Sum("speed", size, width)

    def _download(self, rng: Random) -> tuple[str, str, Sum]:
        key = rng.choice(list(self.facts["downloads"]))
        size, line = key.split("/")
        wide = [f"{line} Mbit/s", f"{line} mbit/s", f"{line} mbit", f"{line} mbps"]
        if line == "1000":
            wide += ["1 Gbit/s", "1 gbit/s", "a gigabit"]
        text = self._say(
            rng.choice(DOWNLOAD_ASK), rng, w=rng.choice(wide),
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
            text = self._say(rng.choice(FIT_ASK), rng, m=said)
            answer, verb = (
                f"Ask `localchat fit {value}`: it says whether it fits, and how fast it will be.",
                "fit",
            )
        else:
            verb = rng.choices(list(NAMED), (6, 3, 2, 2, 1, 1, 1))[0]
            pattern, shape = NAMED[verb]
            text = rng.choice(NAMED_FRAMES).format(self._say(f"({pattern})", rng, m=said))
            answer = shape.replace("{v}", value)
        return roughen(text, rng), answer, Sum("named", value, verb)
