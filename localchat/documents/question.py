"""Turns a question in natural language into an FTS5 query.

Stop words are left out. Any of the other words may occur, and BM25 ranks the passages. The index folds case
and accents and removes English endings (`porter`). For other languages, the start of a long word counts too.
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
"""English, German, French and Spanish words without meaning for a passage."""
_STOP_WORDS: Final = frozenset(_STOP_LIST.split())
_STEM_FROM: Final = 8
"""Letters from which on the start of a word is searched too."""
_MAX_WORDS: Final = 48


def match_query(question: str) -> str:
    """Return an FTS5 expression for the words of a question, or an empty string."""
    words = list(dict.fromkeys(re.findall(r"\w+", segmented(question).lower().replace("_", " "))))
    searched = [term for term in words if term not in _STOP_WORDS] or words
    terms = []
    for term in searched[:_MAX_WORDS]:
        terms.append(f'"{term}"')
        if len(term) >= _STEM_FROM and term.isalpha():
            terms.append(f'"{term[:-2]}"*')
    return " OR ".join(terms)
