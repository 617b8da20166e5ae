r"""LaTeX formulas as Unicode text: `\frac{a+b}{2}` as `(a+b)/2`, `x_{i+1}` as `xᵢ₊₁`.

What has no form in a terminal stays as it was written. A module of our own: pylatexenc 2.11 writes `x_{i+1}` as
`x_i+1` and the fraction above as `a+b/2`, unicodeit 0.7.5 knows no fractions with operators.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Final

_MAX_DEPTH: Final = 30


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Names and their signs, by turns."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_GREEK: Final = _words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon "
    "phi chi psi omega"
)
_LAMBDA: Final = {"lambda": "lamda"}  # as Unicode spells it
_SYMBOLS: Final = _pairs("""
    varepsilon ε vartheta ϑ varphi φ varrho ϱ varsigma ς varpi ϖ infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ
    Re ℜ Im ℑ aleph ℵ emptyset ∅ varnothing ∅ forall ∀ exists ∃ nexists ∄ neg ¬ lnot ¬ top ⊤ bot ⊥ angle ∠
    sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂
    pm ± mp ∓ times × div ÷ cdot · cdotp · ast ∗ star ⋆ circ ∘ bullet • oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙
    cup ∪ cap ∩ setminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ dagger † le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥
    ne ≠ neq ≠ ll ≪ gg ≫ approx ≈ sim ∼ simeq ≃ cong ≅ equiv ≡ propto ∝ in ∈ notin ∉ ni ∋ subset ⊂
    subseteq ⊆ supset ⊃ supseteq ⊇ subsetneq ⊊ perp ⊥ parallel ∥ mid ∣ nmid ∤ prec ≺ succ ≻ models ⊨ vdash ⊢
    to → rightarrow → longrightarrow ⟶ xrightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒
    implies ⟹ Leftarrow ⇐ Leftrightarrow ⇔ iff ⟺ mapsto ↦ uparrow ↑ downarrow ↓ hookrightarrow ↪
    rightharpoonup ⇀ rightleftharpoons ⇌ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ prime ′ degree °
    therefore ∴ because ∵ square □ blacksquare ■ checkmark ✓ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈
    rceil ⌉ vert | lvert | rvert | Vert ‖ lVert ‖ rVert ‖ lbrace { rbrace } lbrack [ rbrack ] backslash \\
    colon : imath ı jmath ȷ
""")
_SPACES: Final = {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "quad": "  ", "qquad": "    "}
_FUNCTIONS: Final = frozenset(
    _words(
        "arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup "
        "ln log max min Pr sec sin sinh sup tan tanh argmax argmin bmod mod"
    )
)
_DROPPED: Final = frozenset(
    _words(
        "displaystyle textstyle scriptstyle limits nolimits left right big Big bigg Bigg bigl bigr Bigl Bigr "
        "biggl biggr middle nonumber notag hfill centering rm bf it"
    )
)
_PLAIN: Final = frozenset(
    _words(
        "text textbf textit textrm texttt textsf textnormal mathrm mathbf mathit mathsf mathtt mathcal mathscr "
        "mathfrak operatorname boldsymbol bm mbox boxed underbrace overbrace substack phantom"
    )
)
_DOUBLE_STRUCK: Final = dict(zip("CHNPQRZEFKT1", "ℂℍℕℙℚℝℤ𝔼𝔽𝕂𝕋𝟙", strict=True))
_ACCENTS: Final = {
    "hat": "\u0302",
    "widehat": "\u0302",
    "bar": "\u0304",
    "overline": "\u0305",
    "vec": "\u20d7",
    "tilde": "\u0303",
    "widetilde": "\u0303",
    "dot": "\u0307",
    "ddot": "\u0308",
    "underline": "\u0332",
    "not": "\u0338",
    "check": "\u030c",
}
_SUPERSCRIPTS: Final = str.maketrans(
    "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW′ ",
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂ′ ",
)
_SUBSCRIPTS: Final = str.maketrans(
    "0123456789+-=()aehijklmnoprstuvxβγρφχ ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ "
)
_SIMPLE: Final = re.compile(r"[\w.′\u0300-\u036f\u2070-\u209f∞√]*|\(.*\)")
_COMMAND: Final = re.compile(r"\\([A-Za-z]+\*?|.)", re.DOTALL)
_MATRICES: Final = {
    "pmatrix": "()",
    "bmatrix": "[]",
    "vmatrix": "||",
    "Bmatrix": "{}",
    "matrix": "[]",
}


@lru_cache(1024)
def to_unicode(source: str) -> str:
    """A formula without its delimiters as text. Rows of an aligned formula are lines."""
    text = _Formula(source).read()
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


class _Formula:
    """Reads one formula from left to right."""

    def __init__(self, source: str, depth: int = 0) -> None:
        """`depth`: of the group or environment around it."""
        self._text = source
        self._at = 0
        self._depth = depth

    def read(self) -> str:
        parts = []
        while self._at < len(self._text):
            parts.append(self._until(""))
            if self._at < len(self._text):  # a brace that closes nothing
                parts.append(self._text[self._at])
                self._at += 1
        return "".join(parts)

    def _until(self, stop: str) -> str:
        """Everything up to `stop` or a closing brace, which is not consumed."""
        parts: list[str] = []
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "}" or letter == stop:
                break
            if letter in "^_":
                self._at += 1
                parts.append(self._script(letter))
            else:
                parts.append(self._atom())
        return "".join(parts)

    def _atom(self) -> str:
        """Convert a character, a group, or a command with its arguments."""
        letter = self._text[self._at]
        if letter == "\\":
            return self._command()
        self._at += 1
        if letter == "{":
            return self._group()
        return {"~": " ", "&": "  ", "'": "′", "\n": " "}.get(letter, letter)

    def _group(self) -> str:
        """The rest of a group whose brace is read."""
        if self._depth >= _MAX_DEPTH:
            return "{"
        self._depth += 1
        inside = self._until("")
        self._depth -= 1
        if self._at >= len(self._text):
            return f"{{{inside}"  # it is never closed
        self._at += 1
        return inside

    def _argument(self) -> str:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        if self._at >= len(self._text) or self._text[self._at] == "}" or self._depth >= _MAX_DEPTH:
            return ""
        self._depth += 1
        argument = self._atom()
        self._depth -= 1
        return argument

    def _raw_argument(self) -> str:
        """An argument in braces as it is written; empty if there is none."""
        end = self._text.find("}", self._at)
        if self._text[self._at : self._at + 1] != "{" or end < 0:
            return ""
        raw = self._text[self._at + 1 : end]
        self._at = end + 1
        return raw

    def _script(self, sign: str) -> str:
        inside = self._argument().strip()
        if sign == "^" and inside in ("∘", "°"):
            return "°"
        table = _SUBSCRIPTS
        if sign == "^":
            table = _SUPERSCRIPTS
        inside = inside.replace("−", "-")
        if not inside:
            return sign
        if all(ord(letter) in table for letter in inside):
            return inside.translate(table).replace(" ", "")
        if len(inside) == 1:
            return f"{sign}{inside}"
        return f"{sign}({inside})"

    def _command(self) -> str:
        match = _COMMAND.match(self._text, self._at)
        if match is None:  # a backslash at the end
            self._at += 1
            return "\\"
        self._at = match.end()
        name = match.group(1)
        starred = name.removesuffix("*")
        if name in _SPACES:
            return _SPACES[name]
        if name == "\\":
            return "\n"
        if not name[0].isalpha():
            if name == "|":
                return "‖"
            return name
        if starred in _SYMBOLS:
            return _SYMBOLS[starred]
        if (letter := _greek(name)) is not None:
            return letter
        if starred in _FUNCTIONS:
            following = self._text[self._at : self._at + 1]
            if following.isalnum() or following == "\\":
                return f"{starred} "
            return starred
        if starred in _DROPPED:
            if (
                starred in ("left", "right", "middle")
                and self._text[self._at : self._at + 1] == "."
            ):
                self._at += 1
            return ""
        if starred in _PLAIN:
            return self._argument()
        if starred in _ACCENTS:
            return _accented(self._argument(), _ACCENTS[starred], starred)
        special = _SPECIAL.get(starred)
        if special is not None:
            return special(self)
        return self._unknown(name)

    def _unknown(self, name: str) -> str:
        """A command as it was written, with its arguments."""
        parts = [f"\\{name}"]
        while self._text[self._at : self._at + 1] == "{":
            self._at += 1
            parts.append(f"{{{self._group()}}}")
        return "".join(parts)

    # ------------------------------------------------------------------ commands with arguments

    def fraction(self) -> str:
        above = self._argument().strip()
        below = self._argument().strip()
        if not above and not below:
            return "\\frac"
        return f"{_in_parentheses(above)}/{_in_parentheses(below)}"

    def binomial(self) -> str:
        return f"({self._argument()} choose {self._argument()})"

    def root(self) -> str:
        degree = ""
        if self._text[self._at : self._at + 1] == "[":
            self._at += 1
            degree = self._until("]")
            self._at += 1
        of = _in_parentheses(self._argument().strip())
        sign = {"3": "∛", "4": "∜"}.get(degree)
        if sign is None:
            raised = all(ord(letter) in _SUPERSCRIPTS for letter in degree)
            sign = f"{degree.translate(_SUPERSCRIPTS) if raised else f'{degree} '}√"
        return f"{sign}{of}"

    def double_struck(self) -> str:
        return "".join(_DOUBLE_STRUCK.get(letter, letter) for letter in self._argument())

    def remainder(self) -> str:
        return f" (mod {self._argument()})"

    def tag(self) -> str:
        return f"  ({self._argument()})"

    def nothing(self) -> str:
        self._raw_argument()
        return ""

    def environment(self) -> str:
        name = self._raw_argument().removesuffix("*")
        end = re.compile(rf"\\end\s*{{{re.escape(name)}\*?}}").search(self._text, self._at)
        if end is None or self._depth >= _MAX_DEPTH:
            return f"\\begin{{{name}}}"
        if name in ("array", "tabular"):
            self._raw_argument()
        inside = _Formula(self._text[self._at : end.start()], self._depth + 1)
        self._at = end.end()
        rows = [" ".join(row.split()) for row in inside.read().split("\n") if row.strip()]
        if name in _MATRICES or name == "array":
            ends = _MATRICES.get(name, "[]")
            return f"{ends[0]}{'; '.join(rows)}{ends[1]}"
        if name == "cases":
            if len(rows) < 2:
                return "{ " + "\n".join(rows)
            return "\n" + "\n".join(f"⎨ {r}" for r in rows)
        return "\n".join(rows)

    def stacked(self) -> str:
        above = self._argument()
        below = self._argument()
        return f"{below}^({above})"


_SPECIAL: Final[dict[str, Callable[[_Formula], str]]] = {
    **dict.fromkeys(("frac", "dfrac", "tfrac", "cfrac", "sfrac"), _Formula.fraction),
    **dict.fromkeys(("binom", "dbinom", "tbinom"), _Formula.binomial),
    **dict.fromkeys(("label", "hspace", "vspace", "color"), _Formula.nothing),
    **dict.fromkeys(("overset", "stackrel"), _Formula.stacked),
    "sqrt": _Formula.root,
    "mathbb": _Formula.double_struck,
    "pmod": _Formula.remainder,
    "tag": _Formula.tag,
    "begin": _Formula.environment,
}


def _greek(name: str) -> str | None:
    low = name.lower()
    if low not in _GREEK or name not in (low, low.capitalize()):
        return None
    case = "CAPITAL"
    if name == low:
        case = "SMALL"
    return unicodedata.lookup(f"GREEK {case} LETTER {_LAMBDA.get(low, low).upper()}")


def _accented(inside: str, mark: str, name: str) -> str:
    if len(inside) == 1 or (inside and name in ("overline", "underline", "bar")):
        marked = "".join(letter + mark for letter in inside)
        return unicodedata.normalize("NFC", marked)
    return f"{name}({inside})"


def _in_parentheses(text: str) -> str:
    if _SIMPLE.fullmatch(text):
        return text
    return f"({text})"
