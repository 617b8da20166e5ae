"""Turns a question in natural words into an FTS5 query.

Words that say nothing are left out; any of the others may occur, and BM25 ranks. The index folds case and
accents and takes English endings off (`porter`); of long words the beginning counts too, for other languages.
"""

import re
from typing import Final

from localchat.history.search_query import segmented

_STOP_LIST: Final = """
a aber about according after all alle allem allen aller alles als also am an and any are as at au auch auf
aus aux avec be been before bei being between bin bis bist both but by can ce ces cette como con could cual
cuando cuál cuándo cómo da damit dann dans das dass de dein del dem den der des did die dies diese diesem
diesen dieser dieses do doch document documents does doing donde dort du durch dónde ein eine einem einen
einer eines el ella elle er es est et etwas file for from für gibt habe haben had has hat hatte have he hier
how i ich if ihr il im in into is ist it its ja jede jeder just kann kein keine können la las le les leur
los mais man may me mehr mein mich might mir mit more most much muss must muy my más nach ne nicht no noch
nor not nous nun nur ob oder of ohne on one only or other our out over own par para pas pero please por pour
qu que quel quelle qui quién qué sa sagt said same say says se según sehr sein seine ses shall she should
sich sie sin sind so soll some son sont steht su such sur sus tell text than that the their them then there
these they this those to too um un und under une uns unter until up us very viel vom von vor vous wann war
waren warum was we weil welche welchem welchen welcher welches wenn wer werden were what when where which
while who whom whose why wie wieviel will wir wird with wo worum would wurde y you your zu zum zur zwischen
über
"""
"""English, German, French and Spanish words that say nothing about a passage."""
_STOP_WORDS: Final = frozenset(_STOP_LIST.split())
_STEM_FROM: Final = 8
"""Letters from which on the beginning of a word counts."""
_MOST_WORDS: Final = 48


def match_query(question: str) -> str:
    """An FTS5 expression for the words of a question; empty where it has none."""
    words = list(dict.fromkeys(re.findall(r"\w+", segmented(question).lower().replace("_", " "))))
    told = [word for word in words if word not in _STOP_WORDS] or words
    terms = []
    for word in told[:_MOST_WORDS]:
        terms.append(f'"{word}"')
        if len(word) >= _STEM_FROM and word.isalpha():
            terms.append(f'"{word[:-2]}"*')
    return " OR ".join(terms)
