# SPDX-License-Identifier: Apache-2.0
"""The document of the demo and the question about it.

The document is the log of a lighthouse, as long as one likes, with one fact in it. Nothing is
random, so that every run and every machine asks the same prompt.
"""

from collections.abc import Callable, Sequence
from typing import Final

import attrs

ACCESS_CODE: Final = "7305"
QUESTION: Final = "What is the access code of the lamp room?"

# The lengths have no common divisor, so that the same entry does not come back for a long time.
_WEATHER: Final = (
    "Calm and clear from dawn to dusk",
    "Wind from the north-west, and rain until noon",
    "Fog lay on the water all morning",
    "A stiff breeze from the south with a short, steep sea",
    "Bright sun and a falling glass",
    "Low cloud, no wind, and the gulls very quiet",
    "A hard gale in the night that was gone by breakfast",
)
_WORK: Final = (
    "We scraped the rust off the gallery rail and gave it a first coat of red paint",
    "Marta took the clockwork apart, cleaned it and put it together again",
    "The rain tank was emptied, scrubbed and filled from the roof",
    "All day went on new putty for the windows of the stair",
    "I oiled the hinges of the boat house and sorted the old ropes",
    "Two steps of the landing were loose, and we set them in fresh mortar",
    "The lens was polished pane by pane with a soft cloth and vinegar",
    "We counted the stores and wrote a list for the supply boat",
    "The fog horn was tested, and it can be heard on the mainland again",
    "Marta repaired the pump while I carried coal up from the cellar",
    "We moved the spare lamps to the dry shelf behind the stove",
)
_SEEN: Final = (
    "Three herring boats passed close by and the men waved",
    "A seal slept on the flat rock below the window until the tide came in",
    "The mail boat could not land and went back with our letters",
    "A grey ship went by far out without showing a flag",
    "Wild geese flew south in a long line for most of an hour",
    "The doctor came over, looked at my hand and stayed for soup",
    "Nothing was seen on the water but our own buoy",
    "A boy from the village rowed out with fresh bread and eggs",
    "Dolphins played around the reef in the last light",
    "The pilot cutter signalled that the harbour was full",
    "Two painters asked to see the view from the top and drew it",
    "An empty barrel drifted in, and we made a table of it",
    "The steamer to the islands was late and lit from end to end",
)
_EVENING: Final = (
    "In the evening Marta read aloud from the almanac.",
    "We lit the lamp at dusk and it burned without a flicker.",
    "The night watch was quiet.",
    "After supper we played draughts, and I lost.",
    "The cat caught a mouse and was very proud of it.",
)


@attrs.frozen
class Log:
    """What a log says, however long it is.

    Attributes:
        title: Its first line.
        code: The access code.
        depth: Where the fact is: 0 in the first entry, 0.5 in the middle, 1 in the last.
        first_day_index: Day of the first entry, from 0.
    """

    title: str = "The log of the lighthouse on Gull Rock"
    code: str = ACCESS_CODE
    depth: float = attrs.field(
        default=0.5, validator=[attrs.validators.ge(0), attrs.validators.le(1)]
    )
    first_day_index: int = 0

    @property
    def fact(self) -> str:
        """The sentence that the question asks for."""
        return f"Important note: the access code of the lamp room is {self.code}."


_DEMO_LOG: Final = Log()


def _pick(phrases: Sequence[str], day_index: int) -> str:
    return phrases[day_index % len(phrases)]


def _entry(day_index: int, fact: str | None) -> str:
    sentences = [
        f"Day {day_index + 1}. {_pick(_WEATHER, day_index)}.",
        f"{_pick(_WORK, day_index)}.",
        f"{_pick(_SEEN, day_index)}.",
        _pick(_EVENING, day_index),
    ]
    if fact is not None:
        sentences.insert(2, fact)
    return " ".join(sentences)


def write_document(entry_count: int, log: Log = _DEMO_LOG) -> str:
    """Writes a log, with the fact at its depth.

    Args:
        entry_count: Number of days, at least 1.
        log: What it says; by default the demo's, with the fact in its middle.

    Raises:
        ValueError: ``entry_count`` is below 1.
    """
    if entry_count < 1:
        raise ValueError(f"a log has at least one day, got {entry_count}")
    fact_index = min(int(log.depth * entry_count), entry_count - 1)
    entries = [
        _entry(log.first_day_index + index, log.fact if index == fact_index else None)
        for index in range(entry_count)
    ]
    return "\n\n".join([log.title, *entries])


def fit_document(
    token_target: int, count_tokens: Callable[[str], int], log: Log = _DEMO_LOG
) -> str:
    """Writes the longest log that stays within a number of tokens.

    Args:
        token_target: Most tokens that ``count_tokens`` may say.
        count_tokens: Counts the tokens of the whole prompt made of a document. Must not fall as
            the document grows.
        log: What it says.

    Raises:
        ValueError: Even a log of one day is longer; the message says how long it is.
    """
    shortest = count_tokens(write_document(1, log))
    if shortest > token_target:
        raise ValueError(f"the shortest prompt has {shortest} tokens, {token_target} are wanted")
    fits, too_many = 1, 2
    while count_tokens(write_document(too_many, log)) <= token_target:
        fits, too_many = too_many, too_many * 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_tokens(write_document(middle, log)) <= token_target:
            fits = middle
        else:
            too_many = middle
    return write_document(fits, log)


def chat_messages(document: str) -> list[dict[str, str]]:
    """Puts the document and the question into one turn of a chat."""
    return [{"role": "user", "content": f"{document}\n\nQuestion: {QUESTION}"}]
