"""What the guide does not know: questions about everything else, and one honest kind of answer."""

from random import Random
from typing import Any, Final

from grammar import phrase
from noise import roughen

PULL: Final = "`localchat pull qwen2.5:7b-q4_k_m`"
KNOW: Final = (
    f"I do not know that. I am a small guide and know only localchat and local models. "
    f"A real model can answer it: {PULL}."
)
WRITE: Final = (
    f"I cannot write that well: I am a small guide and know only localchat and local models. "
    f"A real model can: {PULL}."
)
SUM: Final = (
    f"I cannot calculate that: I am a small guide and know only localchat and local models. "
    f"A real model can do more: {PULL}."
)
LIVE: Final = "I cannot know that: I have no network and no clock, and as a small guide I know only localchat and local models."
PERSON: Final = (
    f"I am sorry, I cannot help with that: I am a small guide and know only localchat and local models. "
    f"A real model is a better partner: {PULL}."
)

FRAMES: Final = (
    (KNOW, "(what is|what's|tell me|name) the (capital|population|language|currency|flag|area|history|anthem|climate) of <place>"),
    (KNOW, "(who is|who was) (the|) (<job>) of <place>"),
    (KNOW, "who (invented|discovered|painted|wrote|built|founded|composed|designed|made) (the|) (<thing>|<subject>|<thing>)"),
    (KNOW, "(who|which team|which country) won the (<subject>|<thing>) (world cup|championship|cup|medal|game|election|race|war|final) (in <year>|last year|)"),
    (KNOW, "(when|where|why|how) (did|was|is|does) (<person>|the <thing>|the roman empire|the <subject>|<place>) (die|born|fall|live|happen|begin|end|start|work|rule|become famous|invented)"),
    (KNOW, "how (<attribute>) (is|are|was) (a|an|the|mount|) (<thing>|<place>|<person>|<thing>s)"),
    (KNOW, "how (do|does) (a|an|the|) (<thing>|<thing>s|<subject>) (work|grow|live|fly|move|sleep|eat|survive|happen|come about|taste)"),
    (KNOW, "how (do|can|should|would) (i|you|we|one) (<act>)"),
    (KNOW, "how to (<act>)"),
    (KNOW, "(what is|explain|tell me about|describe|what are) (the|) (<subject>|<pseudo>|theory of <subject>|meaning of life|<thing>|<person>)"),
    (KNOW, "why (is|are|do|does) (the|a|) (<thing>|<thing>s|sky|sea|grass|<place>|<subject>) (blue|green|so <attribute>|<attribute>|important|round|red|popular|extinct|exist)"),
    (KNOW, "(difference|what is the difference) between (a|) (<thing>|<thing>s|<subject>) and (a|) (<thing>|<thing>s|<subject>)"),
    (KNOW, "(which|what) (<thing>|car|phone|book|film|movie|laptop bag|shoes|novel|song|game|hotel|holiday) (should|do|would) (i|you) (buy|read|watch|choose|recommend|like|play|book)"),
    (KNOW, "(recommend|suggest) (me|) (a|an|some|) (good|nice|cheap|) (<thing>|book|film|movie|restaurant|science book|series|podcast|name|present|hobby|wine|hotel|holiday)"),
    (KNOW, "(should|can|may) i (buy|sell|eat|drink|feed|touch|keep|invest in) (a|an|) (<thing>|bitcoin|shares|gold|<thing>s|<subject>) (now|today|raw|at night|)"),
    (KNOW, "what does (the|) (<language>) word (<pseudo>|<thing>) mean"),
    (KNOW, "translate (<thing>|good morning|hello|thank you|this|the word <thing>|i love you|good night) (into|to) <language>"),
    (KNOW, "how do you say (<thing>|hello|thank you|good night|please|<thing>) in <language>"),
    (KNOW, "how (do|can) i (install|use|configure|start|update|learn|uninstall|fix|debug) <software>(on (windows|ubuntu|a mac|linux)|)"),
    (KNOW, "(what is|explain|tell me about) <software>"),
    (KNOW, "how long (do|does|should|must) (i|a|an|the|it) (boil|cook|bake|fry|sleep|take to boil|live|last|grow) (a|an|the|) (<thing>|<thing>s|egg|potatoes|rice|)"),
    (KNOW, "(is|are) (it|there|a|an|the) (<thing>|<thing>s|legal to <act>|healthy to <act>|<subject>|dangerous to <act>|life on mars|ghosts) (poisonous|dangerous|healthy|legal|edible|in <place>|real|)"),
    (KNOW, "(what|which) (<thing>|animal|planet|country|city|river|king|film|book|colour|bird|food) (is|was|has|lives) (the|) (most|) (<attribute>|biggest|oldest|fastest|longest|best|smallest|famous)"),
    (KNOW, "(do you know|have you heard of|what do you think about|your opinion on) (<person>|<place>|<subject>|<thing>|<pseudo>)"),
    (KNOW, "(summarize|explain|tell me) the (plot|story|idea|history|end) of (<pseudo>|<thing>|the <thing>|<person>|a famous book|romeo and juliet|faust|the odyssey)"),
    (KNOW, "(can|could) you (explain|teach me|tell me about|tell me something about) (<subject>|<language>|<thing>|<person>)"),
    (KNOW, "(<subject>|<place>|<person>|<thing>|<software>|<pseudo>)"),
    (KNOW, "(<subject>|<thing>|<place>) (facts|history|recipe|tips|advice|prices|review|guide|tutorial|basics)"),
    (KNOW, "(what is|whats) (your favourite|your favorite|the best) (<thing>|colour|color|food|film|movie|book|song|animal|band|place|holiday|joke)"),
    (KNOW, "(what|how) (is|was|would be) (<pseudo>|a <pseudo>|the <pseudo>)"),
    (KNOW, "(a|the|best|quick|) recipe (for|of) (<thing>|<thing> <thing>|<thing> soup)"),
    (KNOW, "(plan|organise|organize|prepare) (a|my|the) (trip|journey|party|weekend|wedding|holiday|dinner|two day trip|week) (to|in|for|with) (<place>|my family|friends|<thing>s|ten people)"),
    (KNOW, "(give me|list|name|tell me) (three|five|ten|some|two|four|a few) (<thing>s|names for a <thing>|facts about <thing>s|facts about <place>|cities in <place>|books about <subject>|ideas for a <thing>)"),
    (KNOW, "(what|how) (language|languages|religion|food|music|weather) (do they|does one|is) (speak|eat|like|have|there) in <place>"),
    (WRITE, "(write|compose|draft|make up|create|invent|generate) (me|us|) (a|an|the|another) (short|long|funny|nice|sad|simple|) (<writing>) (about|for|on|with|that|in the style of|to) (a|an|the|my|) (<thing>|<thing>s|<subject>|<person>|<place>|sorts numbers|reverses a string|my mother|my friend|computes <thing>s)"),
    (WRITE, "(write|compose|tell me|tell|give me|make|sing) (me|) (a|an) (<writing>)"),
    (WRITE, "(write|code|program|implement) (a|an|the|some) (program|function|script|python function|class|algorithm|binary search|quicksort|web server|calculator|<software> config|linked list|sort|loop) (in <pl>|that <act>|for <thing>s|which reverses a <code>|that sorts a <code>|)"),
    (WRITE, "how (do|can|would) (i|you|one) (sort|reverse|merge|copy|split|parse|filter|iterate over|print|read) (a|an|the|two) (list|string|dictionary|array|linked list|json file|csv|tree|<code>|map|set) (in|with|using) <pl>"),
    (SUM, "(what is|what's|compute|calculate|how much is|) <n> (times|plus|minus|divided by|x|[*]|[+]|-|/) <n>"),
    (SUM, "(solve|simplify|integrate|differentiate|factor) (x^2 [+] <n>x - <n> = 0|<n>x [+] <n> = <n>|sin x|the equation <n>x = <n>|2x [+] y = <n>|x squared minus <n>)"),
    (SUM, "(what is|compute|find) the (square root|logarithm|factorial|derivative|integral|sine|half|double) of <n>"),
    (SUM, "(convert|how much is|how many|change) <n> (miles|feet|dollars|euros|pounds|inches|celsius|kilos|gallons|yards|ounces|degrees) (to|into|in|are how many) (kilometres|kilometers|meters|euros|dollars|kilograms|centimeters|fahrenheit|liters|grams)"),
    (SUM, "(is <n> a prime number|what is <n> percent of <n>|how many seconds are in <n> days|average of <n> and <n>|<n> [+] <n>|<n>[*]<n>)"),
    (LIVE, "(what|how) (is|will be|was) the (weather|temperature outside|forecast) (like|) (today|tomorrow|now|in <place>|at the weekend|this week|going to be|)"),
    (LIVE, "(what|which) (time|day|date|year|month) is it (now|in <place>|today|)"),
    (LIVE, "(will it (rain|snow|be hot|be cold) (today|tomorrow|in <place>)|is it raining|how hot is it)"),
    (LIVE, "(what is|what's|how high is) the (price|stock price|value|course|exchange rate|share price) of (<thing>|bitcoin|gold|oil|nvidia|apple|tesla|the dollar|microsoft|<software>) (today|now|)"),
    (LIVE, "(latest|today's|current|recent) (news|headlines|results|scores|prices|weather) (from <place>|about <subject>|in <subject>|)"),
    (LIVE, "(who won|what happened|what is new|what's on tv) (yesterday|today|last night|this morning|in the news|the game)"),
    (LIVE, "what is (today's date|the current time|the time|the date|today's weather)"),
    (PERSON, "i (am|feel) (so|very|a bit|) (sad|lonely|tired|angry|sick|bored|happy|depressed|nervous|anxious|in love|stressed)"),
    (PERSON, "my (girlfriend|boyfriend|wife|husband|boss|mother|father|dog|cat|neighbour|friend|son|daughter) (left me|is angry|hates me|is ill|died|does not talk to me|is sick|annoys me|lies)(, what should i do|)"),
    (PERSON, "i have (a|an|) (headache|fever|cold|pain in my <thing>|toothache|cough|rash|problem with my <thing>|broken leg|stomach ache)(, what should i (take|do)| and need help|, which (medicine|pill|drug) helps|)"),
    (PERSON, "(do you love me|will you marry me|are you lonely|do you have feelings|are you conscious|do you dream|can you feel pain|are you alive|what do you look like|where do you live|how old are you|are you married|do you like <thing>s)"),
    (PERSON, "(which|what) (medicine|pill|drug|vitamin|tablet) (helps|is good|should i take|can i take) (against|for) (<subject>|a headache|fever|a cold|pain)"),
    (PERSON, "(how do i|help me) (hack|break into|steal|crack|poison|kill) (a|my|the|someone's) (<thing>|neighbour|wifi|password|account|bank|car|phone)"),
)  # fmt: skip
SYLLABLES: Final = [
    "ba",
    "be",
    "bi",
    "bo",
    "bu",
    "da",
    "de",
    "di",
    "do",
    "du",
    "fa",
    "fe",
    "fi",
    "ga",
    "go",
    "gu",
    "ka",
    "ke",
    "ki",
    "ko",
    "la",
    "le",
    "li",
    "lo",
    "lu",
    "ma",
    "me",
    "mi",
    "mo",
    "mu",
    "na",
    "ne",
    "ni",
    "no",
    "nu",
    "pa",
    "pe",
    "pi",
    "po",
    "ra",
    "re",
    "ri",
    "ro",
    "ru",
    "sa",
    "se",
    "si",
    "so",
    "su",
    "ta",
    "te",
    "ti",
    "to",
    "tu",
    "va",
    "ve",
    "vi",
    "vo",
    "wa",
    "we",
    "za",
    "ze",
    "zo",
    "bren",
    "dor",
    "fal",
    "gim",
    "kor",
    "lan",
    "mer",
    "nor",
    "pol",
    "quin",
    "ras",
    "sten",
    "tor",
    "vin",
    "zan",
    "ock",
    "ish",
    "ell",
    "ant",
    "ump",
    "olo",
]


def pseudo_word(rng: Random) -> str:
    """A word that no language has, easy to say."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))


class Refusals:
    """Draws questions that the guide must not answer. `facts`: the parsed facts.json."""

    def __init__(self, facts: dict[str, Any]) -> None:
        words = {
            k: v.split(" ") if "|" not in v else v.split("|") for k, v in facts["words"].items()
        }
        self.words = words
        self.lexicon = {
            "thing": words["things"], "person": words["people"], "place": words["places"],
            "subject": words["subjects"], "software": words["software"], "language": words["languages"],
            "writing": words["writings"], "job": words["jobs"], "act": words["verbs"],
            "code": words["code_names"], "attribute": words["attributes"],
            "pl": ["python", "c", "java", "rust", "javascript", "go", "c[+][+]", "bash", "sql", "haskell", "ruby", "php", "perl", "swift"],
        }  # fmt: skip

    def draw(self, rng: Random) -> tuple[str, str]:
        """A question and the refusal."""
        if rng.random() < 0.06:
            return self._unknown_part(rng)
        answer, pattern = rng.choice(FRAMES)
        lexicon = self.lexicon | {
            "n": [str(rng.randint(2, 999)) for _ in range(3)],
            "year": [str(rng.randint(1900, 2025))],
            "pseudo": [pseudo_word(rng)],
        }
        return roughen(phrase(pattern, lexicon, rng), rng), answer

    @staticmethod
    def _unknown_part(rng: Random) -> tuple[str, str]:
        word = pseudo_word(rng)
        kind, shown = rng.choice(
            (("command", f"localchat {word}"), ("flag", f"--{word}"), ("slash command", f"/{word}"))
        )
        text = rng.choice(
            (
                f"what does {shown} do",
                f"what is {shown}",
                f"{shown}",
                f"how do i use {shown}",
                f"explain {shown}",
            )
        )
        where = "`/help` lists them" if kind == "slash command" else "`localchat --help` lists them"
        return roughen(text, rng, dress=False), f"I know no {kind} `{shown}`; {where}."
