"""Samples for kvzap.train_end_to_end: contexts, and questions whose answers need pairs far back."""
from __future__ import annotations

import dataclasses
import random
import re
from typing import TYPE_CHECKING, Any

from ._errors import Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_ADJECTIVES = ("amber brave calm distant early faint gentle hollow icy jolly keen lively misty narrow odd plain quick rusty "
               "silent tall upper vast warm young zesty").split()
_NOUNS = ("anchor bridge candle desert engine forest garden harbour island jacket kettle lantern meadow needle orchard pillar "
          "quarry river saddle tower umbrella valley window yard zebra").split()
_KINDS = ("access code", "ticket number", "serial number", "secret word", "pass phrase", "locker key", "account name")
_STATEMENTS = ("The {kind} of {key} is {value}.", "Note: for {key}, the {kind} is {value}.",
               "{key} has the following {kind}: {value}.", "Please use {value} as the {kind} of {key}.")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A context, and questions about it, as token ids.

    context: tokens that are pruned after they are read
    questions: of each, the tokens after the context up to the answer, and the answer's tokens. Each question follows the
        context alone.
    """

    context: Sequence[int]
    questions: Sequence[tuple[Sequence[int], Sequence[int]]]

    def __post_init__(self) -> None:
        if not self.context or not self.questions or any(not question or not answer for question, answer in self.questions):
            raise ValueError("Sample: expected a context and questions, each with tokens before and in its answer")

    def predicting(self) -> torch.Tensor:
        """Indices, within all questions' tokens, of the tokens that predict the answers' tokens."""
        import torch

        found, begin = [], 0
        for question, answer in self.questions:
            found.append(torch.arange(len(answer)) + begin + len(question) - 1)
            begin += len(question) + len(answer)
        return torch.cat(found)


def _value(draw: random.Random, kind: str) -> str:
    if kind in ("secret word", "account name"):
        return f"{draw.choice(_ADJECTIVES)}{draw.choice(('-', '', '_'))}{draw.choice(_NOUNS)}"
    if kind == "pass phrase":
        return " ".join(draw.choice(_NOUNS) for _ in range(draw.randint(2, 4)))
    if kind == "locker key":
        return "-".join("%0*x" % (length, draw.getrandbits(4 * length)) for length in draw.choice(((8, 4, 4), (6, 6), (4, 4, 4, 4))))
    return str(draw.randrange(10 ** draw.randint(3, 8)))


class _Writer:
    """Writes the samples of a tokenizer, whose chat template surrounds the context."""

    def __init__(self, tokenizer: Any, tokens: int, draw: random.Random) -> None:
        self.tokenizer, self.tokens, self.draw = tokenizer, tokens, draw
        self.before, self.after = "", "\n"
        if getattr(tokenizer, "chat_template", None):
            mark = "\N{SNOWMAN}"
            text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True)
            self.before, _, self.after = text.partition(mark)
        elif tokenizer.bos_token:
            self.before = tokenizer.bos_token

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def question(self, question: str, prefix: str, answer: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        end = self.ids(self.tokenizer.eos_token) if self.tokenizer.eos_token else ()
        return self.ids(question + self.after + prefix), (*self.ids(answer), *end)

    def facts(self, paragraphs: list[str]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Puts statements between the sentences; returns questions about them."""
        draw, questions = self.draw, []
        kind = draw.choice(_KINDS)
        keys = [f"{draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}" for _ in range(draw.randint(2, 4))]
        values: dict[str, list[str]] = {key: [_value(draw, kind) for _ in range(draw.choice((1, 1, 1, 3)))] for key in keys}
        statements = [(key, value) for key, of_key in values.items() for value in of_key]
        draw.shuffle(statements)
        form = draw.choice(_STATEMENTS)
        for key, value in statements:
            place = draw.randrange(len(paragraphs))
            statement = form.format(kind=kind, key=key, value=value)
            sentences = _SENTENCE.split(paragraphs[place])
            sentences.insert(draw.randrange(len(sentences) + 1), statement[0].upper() + statement[1:])
            paragraphs[place] = " ".join(sentences)
        order = {key: [value for other, value in statements if other == key] for key in values}
        for key in draw.sample(list(values), 2):
            one = len(order[key]) == 1
            asked = (f"What is the {kind} of {key}?", f"The {kind} of {key} is") if one else (
                f"List every {kind} of {key}.", f"The text has these for {key}:")
            questions.append(self.question(*asked, " " + ", ".join(order[key])))
        return questions

    def quote(self, text: str, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Asks for words of the text; the answer begins with the first of them."""
        words = text.split(" ")
        if len(words) < 60:
            return None
        begin = self.draw.randrange(len(words) - 40)
        given = self.draw.randint(5, 9)
        question, prefix = self.ids("Repeat a part of the text, word for word." + self.after), self.ids(" ".join(words[begin:begin + given]))
        return (*question, *prefix), self.ids(" " + " ".join(words[begin + given:begin + 80]))[:tokens]

    def sample(self, text: str) -> Sample | None:
        room = self.tokens - 80
        ids = self.ids(text)
        if len(ids) < room + 100:
            return None
        begin = self.draw.randrange(len(ids) - room - 60)
        body, rest = self.tokenizer.decode(ids[begin:begin + room]), ids[begin + room:begin + room + 40]
        paragraphs = body.split("\n\n")
        questions = self.facts(paragraphs)
        body = "\n\n".join(paragraphs)
        for _ in range(2):
            quoted = self.quote(body, 32)
            if quoted and quoted[1]:
                questions.append(quoted)
        is_continued = self.draw.random() < 0.5
        if is_continued:  # the document itself, as after an eviction while it is read
            questions.append((rest[:1], rest[1:]))
        context = self.ids(self.before + body + ("" if is_continued else "\n\n"))
        return Sample(context, questions)


def recall_samples(tokenizer: Any, texts: Sequence[str], count: int, *, tokens: int = 700, seed: int = 0) -> list[Sample]:
    """Samples whose answers need tokens far back in their context: texts with statements of random words and numbers between
    their sentences, questions about these, quotes of random places, and for half of the samples the text's continuation.

    tokenizer: of transformers; its chat template surrounds context and question
    texts: plain texts of any length; a sample takes `tokens` tokens at a random place. Short texts are left out
    count: number of samples
    seed: of all draws

    Raises kvzap.Error if no text is long enough.
    """
    draw = random.Random(f"{seed} samples")
    writer = _Writer(tokenizer, tokens, draw)
    samples: list[Sample] = []
    order: list[int] = []
    tried = 0
    while len(samples) < count:
        if not order:
            if not texts or (tried and not samples):
                raise Error(f"texts: expected texts of at least {tokens + 20} tokens")
            order = draw.sample(range(len(texts)), len(texts))
            tried += 1
        sample = writer.sample(texts[order.pop()])
        if sample:
            samples.append(sample)
    return samples
