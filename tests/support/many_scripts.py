"""Lines of text in many scripts, for tests of tokenizers."""

import random
import unicodedata
from typing import Literal, TypeAlias

Form: TypeAlias = Literal["NFC", "NFD", "NFKD"]

SAMPLES = {
    "English": "The quick brown fox isn't lazy: it jumps over 13 dogs, at $4.50 (or so)!",
    "Korean": "안녕하세요, 오늘 날씨가 정말 좋습니다. 서울에서 만나요!",
    "Bengali": "আমি বাংলায় গান গাই, আজ আবহাওয়া খুব সুন্দর।",
    "Hindi": "नमस्ते दुनिया, आज मौसम बहुत अच्छा है। हिन्दी में लिखिए।",
    "Tamil": "வணக்கம் உலகம், இன்று வானிலை நன்றாக உள்ளது.",
    "Thai": "สวัสดีชาวโลก วันนี้อากาศดีมาก ๆ นะครับ",
    "Arabic": "السَّلَامُ عَلَيْكُمْ، كَيْفَ حَالُكَ اليَوْمَ؟",
    "Hebrew": "שָׁלוֹם עוֹלָם, מה שלומך היום?",
    "Vietnamese": "Xin chào thế giới, hôm nay trời đẹp quá; Việt Nam đất nước tôi.",
    "Czech": "Příliš žluťoučký kůň úpěl ďábelské ódy – „ano“.",
    "Turkish": "İstanbul'da IŞIK, ılık çığ ve ĞÜÖ.",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· ΣΊΣΥΦΟΣ;",
    "Russian": "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Chinese": "今天天气很好，我们去公园吧。𠀀𫠝 漢字",
    "Japanese": "東京タワーへ行きましょう。ガギグゲゴ、ﾊﾟﾋﾟ。",
    "Georgian": "გამარჯობა მსოფლიო ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ",
    "Emoji": "Great 👍🏽 job 👩‍👩‍👧 🎉🇩🇪 ❤️ ≠ ± € ™ ½",
    "Controls": "a\x00b\x07c\u200bd\ufeffe\u00adf\u00a0g\u3000h\ti\r\nj\ufffdk\u2028l\x85m",
    "Accents": "Ÿ Ǆ ﬁ ß ẞ Å É ñ naïve façade Ångström coöperate",
    "Long words": "a" * 100 + " " + "b" * 101 + " " + "électroencéphalogramme" * 6,
    "Symbols": "[CLS ] ## ##a ▁the `x` a_b ~^|<=> «a» — … ‘q’ “r” ; ´",
}
"""By script or subject, one line."""


def lines(count: int, seed: int = 1) -> list[str]:
    """Return lines made of shuffled pieces of the samples, some composed, decomposed or in capitals."""
    choose = random.Random(seed)
    words = [word for sample in SAMPLES.values() for word in sample.split(" ")]
    made = list(SAMPLES.values())
    while len(made) < count:
        picked = choose.choices(words, k=choose.randint(1, 12))
        # Pieces of words meet without white space too.
        line = "".join(
            word[choose.randrange(3) :] + choose.choice([" ", " ", " ", "", "-", "\n"])
            for word in picked
        )
        form: Form | None = choose.choice((None, None, "NFC", "NFD", "NFKD"))
        line = unicodedata.normalize(form, line) if form else line
        made.append(choose.choice([line, line, line.upper()]))
    return made[:count]
