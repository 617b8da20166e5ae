r"""LaTeX formulas as Unicode text: `\frac{a+b}{2}` as `(a+b)/2`, `x_{i+1}` as `xᵢ₊₁`.

Groups are rewritten from the inside out. What has no form in a terminal stays as it was written. A module of
our own: pylatexenc 2.11 writes `x_{i+1}` as `x_i+1` and the fraction above as `a+b/2`, unicodeit 0.7.5 knows no
fractions with operators.
"""

import re
import unicodedata
from functools import lru_cache
from typing import Final

_MAX_DEPTH: Final = 30


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Return a table from names and their signs, by turns."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_SYMBOLS: Final = _pairs("""
    alpha α beta β gamma γ delta δ epsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π
    rho ρ sigma σ tau τ upsilon υ phi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π
    Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
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
_SPACES: Final = {
    ",": " ",
    ";": " ",
    ":": " ",
    "!": "",
    "quad": "  ",
    "qquad": "    ",
    "\\": "\n",
    "|": "‖",
}
_FUNCTIONS: Final = _words(
    "arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup "
    "ln log max min Pr sec sin sinh sup tan tanh argmax argmin bmod mod"
)
_DROPPED: Final = re.compile(
    r"\\(?:(?:displaystyle|textstyle|limits|nolimits|[bB]igg?[lr]?|nonumber)(?![A-Za-z])|(?:left|right)(?![A-Za-z])\.?"
    r"|(?:begin|end)\{[A-Za-z]+\*?\})"
)
_PLAIN: Final = _words(
    "text textbf textit textrm texttt mathrm mathbf mathit mathsf mathtt mathcal operatorname boldsymbol "
    "bm mbox boxed underbrace overbrace"
)
_DOUBLE_STRUCK: Final = dict(zip("CHNPQRZEF1", "ℂℍℕℙℚℝℤ𝔼𝔽𝟙", strict=True))
_ACCENTS: Final = {
    "hat": "\u0302",
    "bar": "\u0304",
    "overline": "\u0305",
    "vec": "\u20d7",
    "tilde": "\u0303",
    "dot": "\u0307",
    "ddot": "\u0308",
}
_ROOTS: Final = {"": "√", "3": "∛", "4": "∜"}
_SUPERSCRIPTS: Final = str.maketrans(
    "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW′ ",
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂ′ ",
)
_SUBSCRIPTS: Final = str.maketrans(
    "0123456789+-=()aehijklmnoprstuvxβγρφχ ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ "
)
_SIMPLE: Final = re.compile(r"[\w.′\u0300-\u036f\u2070-\u209f∞√]*|\(.*\)")
_COMMAND: Final = re.compile(r"\\([A-Za-z]+\*?|.)")
_MATRIX: Final = re.compile(
    r"\\begin\{([pbvB]?matrix|array)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}", re.DOTALL
)
_BRACKETS: Final = {"pmatrix": "()", "vmatrix": "||", "array": "  "}
_SHORT_ARGUMENT: Final = re.compile(r"([\^_]\s*|\\(?:sqrt|hat|bar|vec|tilde|dot)\s+)([^\s{}\\])")
_SHORT_FRACTION: Final = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_INNERMOST: Final = re.compile(
    r"(?:(\\[A-Za-z]+|[\^_])\s*|(?<!\}))(?:\[([^\][{}]*)\])?((?:\{[^{}]*\})+)"
)
"""Groups without groups inside, and the command or sign before them."""
_LITERAL_BRACES: Final = str.maketrans("{}", "\ue000\ue001")
"""Stand-ins for braces that are text, from Unicode's private area."""


@lru_cache(1024)
def to_unicode(source: str) -> str:
    """Return a formula without its delimiters as text. Rows of an aligned formula are lines."""
    text = _MATRIX.sub(_matrix, source.replace("\n", " "))
    text = _COMMAND.sub(_symbol, _DROPPED.sub("", text)).replace("&", "  ").replace("~", " ")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text.replace("'", "′"))
    text = _SHORT_ARGUMENT.sub(r"\1{\2}", text)
    for _ in range(_MAX_DEPTH):
        before = text
        text = _INNERMOST.sub(_without_groups, text)
        if text == before:
            break
    text = text.translate({0xE000: "{", 0xE001: "}"})
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _matrix(match: re.Match[str]) -> str:
    """Return a matrix in one line: its rows between semicolons."""
    brackets = _BRACKETS.get(match[1], "[]")
    rows = (row.strip() for row in match[2].split(r"\\"))
    return brackets[0] + "; ".join(row for row in rows if row) + brackets[1]


def _symbol(match: re.Match[str]) -> str:
    """Return the sign of a command without arguments. Other commands stay."""
    name = match[1].removesuffix("*")
    if name in _SPACES:
        return _SPACES[name]
    if not name[:1].isalpha():
        return name.translate(_LITERAL_BRACES)
    if name in _FUNCTIONS:
        following = match.string[match.end() : match.end() + 1]
        if following.isalnum() or following == "\\":
            return f"{name} "
        return name
    return _SYMBOLS.get(name, match[0])


def _without_groups(match: re.Match[str]) -> str:
    """Rewrite a command with its arguments, or a group without a command."""
    command = (match[1] or "").removeprefix("\\")
    option = match[2] or ""
    first, *others = match[3][1:-1].split("}{")
    later_groups = "".join(f"{{{group}}}" for group in others)
    if match[1] is None:
        if match.string[: match.start()].endswith("\ue001"):
            return match[0].translate(_LITERAL_BRACES)  # a further argument of an unknown command
        if match[2] is not None:
            first = f"[{option}]{first}"
        return first + later_groups
    if command in ("^", "_"):
        return _script(command, first.strip()) + later_groups
    if command in _PLAIN:
        return first + later_groups
    if command in _ACCENTS:
        return _accented(first, command) + later_groups
    if command == "mathbb":
        return "".join(_DOUBLE_STRUCK.get(letter, letter) for letter in first) + later_groups
    if command == "sqrt":
        sign = _ROOTS.get(option) or f"{_script('^', option)}√"
        return sign + _in_parentheses(first) + later_groups
    if command in ("frac", "dfrac", "tfrac", "cfrac", "binom"):
        if not others:
            return match[0]  # The second argument still has a group inside.
        if command == "binom":
            return f"({first} choose {others[0]})" + later_groups.partition("}")[2]
        return (
            f"{_in_parentheses(first)}/{_in_parentheses(others[0])}"
            + later_groups.partition("}")[2]
        )
    return match[0].translate(_LITERAL_BRACES)


def _script(sign: str, text: str) -> str:
    """Return a superscript or a subscript. Brackets replace what has no small form."""
    if sign == "^" and text in ("∘", "°"):
        return "°"
    table = _SUBSCRIPTS
    if sign == "^":
        table = _SUPERSCRIPTS
    text = text.replace("−", "-")
    if text and all(ord(letter) in table for letter in text):
        return text.translate(table).replace(" ", "")
    if len(text) < 2:
        return f"{sign}{text}"
    return f"{sign}({text})"


def _accented(text: str, name: str) -> str:
    if len(text) == 1 or (text and name in ("overline", "bar")):
        return unicodedata.normalize("NFC", "".join(letter + _ACCENTS[name] for letter in text))
    return f"{name}({text})"


def _in_parentheses(text: str) -> str:
    text = text.strip()
    if _SIMPLE.fullmatch(text):
        return text
    return f"({text})"
