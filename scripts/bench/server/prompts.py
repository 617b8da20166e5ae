"""Natural prompts for measurements with real models. No prompt is used twice in a run.

A repeated prompt, or one that shares its sentences with others, would let drafts copy earlier answers.
"""

from collections.abc import Iterator
from itertools import count

from localchat.measure.workload import sample_text

_QUESTIONS = (
    "Explain to a beginner {topic}.",
    "I have to give a talk of five minutes on {topic}. What should I say, and in which order?",
    "A friend told me that I misunderstand {topic}. What do most people get wrong about it?",
    "Write a short letter to a local newspaper about {topic}.",
    "Compare two ways to think about {topic}, and tell me which one you would choose and why.",
    "What questions should I ask somebody who knows a lot about {topic}?",
    "Describe a day in the life of a person whose work depends on {topic}.",
)
_TOPICS = (
    "how a suspension bridge carries its load",
    "why bread needs to rest before it is baked",
    "how a city decides where a tram line goes",
    "why the tide comes twice a day",
    "how a small library chooses its books",
    "what makes a good kitchen knife",
    "how bees find their way home",
    "why old wooden houses creak at night",
    "how a referee keeps control of a match",
    "what happens to glass after it is collected",
    "how to plan a garden that survives a dry summer",
    "why some songs stay in the head for days",
    "how a lighthouse was run before electricity",
    "what a doctor listens for with a stethoscope",
    "how to repair a bicycle wheel that wobbles",
    "why airlines overbook their flights",
    "how mountain huts get their food and water",
    "what makes a contract fair to both sides",
    "how to teach a child to swim",
    "why cheese from one valley tastes different from the next",
    "how a museum protects paintings from light",
    "what a ship's pilot does in a narrow harbor",
    "how to keep a diary for more than a month",
    "why cities are warmer than the villages around them",
    "how a translator handles a joke",
    "what to do when a river floods a cellar",
    "how a violin is tuned, and why it goes out of tune",
    "why so many people learn to cook late in life",
    "how a night train is cleaned and turned around",
    "what makes a map easy to read",
    "how a farmer decides when to harvest",
    "why chess players study the endings first",
    "how a bank notices that a card was stolen",
    "what a good apology sounds like",
    "how paper is recycled and how often that works",
    "why a marathon feels hardest after thirty kilometers",
    "how to choose shoes for a long walk",
    "what a stage manager does during a play",
    "how ice was sold before there were refrigerators",
    "why neighbors fall out over hedges",
    "how a radio picks one station out of many",
    "what makes a school timetable so hard to write",
    "how fishermen mend their nets",
    "why a good map of the sea took centuries",
    "how a bakery plans for a holiday weekend",
    "what happens in a parcel center at night",
)
_EDITS = (
    "Write this text again in the past tense and change nothing else.",
    "Copy this text, and replace every semicolon and colon by a period.",
    "Correct the spelling of this text and leave everything else as it is.",
    "Write this text again without its first sentence.",
)


def questions() -> Iterator[str]:
    """Yield different questions. Raises StopIteration after all of them."""
    for question in _QUESTIONS:
        for topic in _TOPICS:
            yield question.format(topic=topic)


def edits(words: int) -> Iterator[str]:
    """Yield tasks whose answer repeats a passage of this many words."""
    for number in count():
        yield f"{_EDITS[number % len(_EDITS)]}\n\n{passage(words, 40 + number)}"


def passage(words: int, number: int) -> str:
    """Return connected text of this many words, which differs from its first word on for each number."""
    text = sample_text().split()
    # 613 is prime, so that the starts spread over the whole text before they come near each other.
    start = number * 613 % len(text)
    # Different first words keep the prefix cache from finding the passage.
    return " ".join([f"{number + 1}.", *(text[start:] + text)[:words]])
