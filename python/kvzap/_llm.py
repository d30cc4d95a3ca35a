"""A model, and sessions that read a text once and answer questions about it."""
from __future__ import annotations

import html
import operator
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from . import _kvzap, _sampling
from ._errors import Error
from ._flags import index, path
from ._report import Report, size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ._kvzap import Pruning, ScorePolicy

    Path = str | os.PathLike[str]
    Content = str | Sequence[int] | Sequence[Mapping[str, str]]


class Session:
    """A context with a pruned cache. `LLM.session` and `LLM.resume` make one.

    Each answer starts from the context alone. A session closes with its `close`, at the end of a `with` block, or
    when it is collected; it then raises kvzap.Error. Threads may use one at a time: others wait.
    """

    def __init__(self, llm: LLM, held: Any) -> None:
        self._llm = llm  # keeps the model
        self._held = held

    def read(self, content: Content) -> Session:
        """Reads the beginning of the user's message; a further call adds to it.

        content: a text; token ids, int32 (tokens) or a list; or, as the first reading, messages
            {"role": ..., "content": ...} of which the last one is the user's

        Returns the session. Raises kvzap.Error for an empty content, too many tokens, and a pruning that allows no
        more context; ValueError for text with surrogates, which bytes that are not UTF-8 become; kvzap.OutOfMemory
        for a cache without memory. After Ctrl-C the session has no context.
        """
        self._held.read(content)
        return self

    def ask(self, question: str = "", *, max_new_tokens: int = 128,
            on_text: Callable[[str], object] | None = None, **sampling: Any) -> str:
        """Asks about the context, and returns the answer's text.

        question: ends the user's message
        max_new_tokens: most tokens of the answer; -1: until it ends, or the longest context. `report.is_cut` says
            whether it was cut
        on_text: called with each piece of the text; the answer ends if it returns False itself
        sampling: temperature, top_k, top_p, min_p, seed (-1: a random one), presence_penalty, frequency_penalty,
            repeat_last_n; those not given are the LLM's. One of these restricts the answer: json_schema (a dictionary,
            a text or a class of pydantic: the answer is JSON that is valid under it), grammar (a text in llama.cpp's
            GBNF), regex (ECMA-262, of the whole answer)

        Raises kvzap.Error before the first `read` and for too many tokens, ValueError for text with surrogates.
        """
        return self._held.ask(question, max_new_tokens, on_text, self._llm._sampling("ask", sampling))

    def stream(self, question: str = "", *, max_new_tokens: int = 128,
               **sampling: Any) -> Generator[str, None, None]:
        """Returns an iterator over the pieces of an answer's text. Closing it ends the answer, after a
        question that is being read. Parameters as of ask."""
        sampling = self._llm._sampling("stream", sampling)
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def on_text(piece: str) -> bool:
            pieces.put(piece)
            return not stop.is_set() and threading.main_thread().is_alive()  # the interpreter waits for the thread

        def run() -> None:
            try:
                self._held.ask(question, max_new_tokens, on_text, sampling)
                pieces.put(None)
            except BaseException as error:  # of the caller's thread
                pieces.put(error)

        def answer() -> Generator[str, None, None]:
            self._held.pruning()  # raises in a callback, where the thread would wait for ever
            thread = threading.Thread(target=run, name="kvzap")
            thread.start()
            try:
                while (piece := pieces.get()) is not None:
                    if isinstance(piece, BaseException):
                        raise piece
                    yield piece
            finally:
                stop.set()
                if thread is not threading.current_thread():
                    thread.join()

        return answer()

    @property
    def report(self) -> Report:
        """The state of the cache, a `Report`."""
        return Report(**self._held.report())

    @property
    def pruning(self) -> Pruning:
        return self._held.pruning()

    @property
    def context_ids(self) -> NDArray[np.int32]:
        """Token ids of the context; int32 (tokens)."""
        return self._held.context_ids()

    @property
    def answer_ids(self) -> NDArray[np.int32]:
        """Token ids of the last answer; int32 (tokens)."""
        return self._held.answer_ids()

    def gather_pages(self) -> None:
        """With `comm`: brings rows that balancing has moved to other ranks back to the ranks that own their heads. All ranks
        call it together."""
        self._held.gather_pages()

    def positions(self, layer: int, head: int) -> NDArray[np.int64]:
        """Positions of the rows that a KV head keeps, ascending; int64 (rows). With `comm`, heads are those of this rank, and
        `gather_pages` comes first. Raises IndexError, and Error if rows lie on other ranks."""
        return self._held.positions(*self._place(layer, head))

    def _place(self, layer: int, head: int) -> tuple[int, int]:
        config = self._llm.config  # of several ranks, each has some of the heads
        return index("layer", layer, config["layers"]), index("head", head, config["kv_heads"])

    def scores(self, layer: int, head: int) -> NDArray[np.float32]:
        """Scores of the same rows; float32 (rows), NaN where there is none. Raises IndexError."""
        return self._held.scores(*self._place(layer, head))

    def keys(self, layer: int, head: int) -> NDArray[np.float32]:
        """Keys of the same rows, after RoPE; float32 (rows, head_dim). Raises IndexError."""
        return self._held.rows(*self._place(layer, head), False)

    def values(self, layer: int, head: int) -> NDArray[np.float32]:
        """Values of the same rows; float32 (rows, head_dim). Raises IndexError."""
        return self._held.rows(*self._place(layer, head), True)

    def save(self, file: Path) -> None:
        """Writes context, cache, and the last question with its answer to an HDF5 file, for `LLM.resume`. `kvzap run`,
        `kvzap chat` and kvzap::Session of C++ continue from it, too, unless the pruning is a ScorePolicy."""
        self._held.save(path(file))

    @property
    def is_closed(self) -> bool:
        return self._held.is_closed

    def close(self) -> None:
        """Frees the cache."""
        self._held.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pruning = f"pruning {self._llm.config['pruning']}"
        if self.is_closed:
            return f"<kvzap.Session, closed, {pruning}>"
        try:
            return f"<kvzap.Session, {size(self._held.live_bytes())} of keys and values, {pruning}>"
        except Error:  # in a callback, or while another thread uses kvzap
            return f"<kvzap.Session, {pruning}>"

    def _repr_html_(self) -> str:
        return html.escape(repr(self)) if self.is_closed else self.report._repr_html_()


class Answers(list[str]):
    """The texts of answers.

    stop_reasons: why each ended: "stop_id" (by itself), "max_new_tokens" or "context_full"
    """

    def __init__(self, answers: Iterable[tuple[str, str]]) -> None:
        pairs = list(answers)
        super().__init__(text for text, _ in pairs)
        self.stop_reasons = [reason for _, reason in pairs]

    @property
    def is_cut(self) -> list[bool]:
        """Whether each answer was cut, at max_new_tokens or at the longest context."""
        return [reason in ("max_new_tokens", "context_full") for reason in self.stop_reasons]


class LLM:
    """A language model with a pruned KV cache. Sessions of it share weights and surrogate; each has its own cache.

        llm = kvzap.LLM("Qwen3-8B", kvzap.Pruning.kvzap("KVzap-mlp-Qwen3-8B", threshold=-4))  # arXiv 2601.07891
        llm.session().read(report).ask("What was decided?")

    model: Hugging Face folder (config.json, *.safetensors, tokenizer.json) or GGUF file
    pruning: a `Pruning`, its text such as "snapkv@evict-ratio=0.5", a `ScorePolicy`, or None for the full cache.
        `kvzap policies` names the paper of each policy
    dtype: type of weights and cache: "bf16", "f16" or "f32"
    kv_type: type of keys and values that have left the window: "q8", "q4", "q3", "q2", two of them for keys and
        values as in "q8,q4", or None for dtype
    weights: "stored" (quantised ones in their blocks), "unpacked", "q8" or "q4" (made at load)
    threads: of this process, 1 to 4096, as kvzap::set_threads of C++ sets them; 0: the number of cores it may use
    max_context: most tokens of context, question and answer; 0: the model's
    chat_template: wrap texts in the model's chat template
    thinking: let a Qwen3 model think before it answers
    system: system message; None: the template's default
    progress: called with "load", "prefill", "question" or "repeat", the steps done and those in total. An exception
        that it raises ends the call
    comm: communicator of mpi4py whose ranks share the model, in a package that is built with MPI: all make the same
        calls in the same order, and rank 0 has the texts. None: this process alone
    lookup: check up to this many guessed tokens with each new one, which followed the same tokens earlier (prompt
        lookup decoding); answers stay the same, and those that quote the prompt come faster. 0 to 32; 0: no guesses
    read_pages: pages of the cache that a decode step reads of each KV head, those that can have the largest scores: a
        number, a share of them as a float above 0 and at most 1, or "all". No pair is evicted
    sampling: temperature (0: greedy), top_k, top_p, min_p, seed (-1: a random one), presence_penalty,
        frequency_penalty, repeat_last_n

    Allocates the weights: their bytes are about those of the files, or of dtype. Raises kvzap.Error if a file or an
    option is not valid, kvzap.PruningError for a pruning that breaks a rule, ValueError for text with surrogates.
    """

    def __init__(self, model: Path, pruning: Pruning | ScorePolicy | str | None = None, *, dtype: str = "bf16",
                 weights: str = "stored", threads: int = 0, max_context: int = 0, chat_template: bool = True,
                 thinking: bool = False, system: str | None = None,
                 progress: Callable[[str, int, int], object] | None = None, comm: Any = None,
                 kv_type: str | None = None, lookup: int = 0, read_pages: float | str = "all",
                 **sampling: float) -> None:
        self._comm = comm
        self._llm = _kvzap._LLM(path(model, "model"), pruning, dtype, weights, threads, max_context, chat_template, thinking,
                                system, progress, comm, kv_type, lookup, read_pages, self._sampling("LLM", sampling))
        self._config = self._llm.description()

    def _sampling(self, call: str, given: dict[str, Any]) -> dict[str, Any]:
        return _sampling.checked(call, given, self._comm)

    def session(self) -> Session:
        """Returns a session without a context. Raises kvzap.Error after `close`."""
        return Session(self, self._llm.session())

    def resume(self, file: Path) -> Session:
        """Returns a session with the context of a file of `Session.save`, `kvzap run` or `kvzap chat`.

        Raises kvzap.Error for another file, for one of another pruning, dtype or chat template, and if model,
        tokenizer or surrogate have changed.
        """
        return Session(self, self._llm.resume(path(file)))

    def generate(self, prompts: Iterable[str | tuple[str, str]], *, max_new_tokens: int = 128,
                 **sampling: Any) -> Answers:
        """Answers many prompts at once, in one engine with continuous batching.

        prompts: texts, or pairs (context, question), of which the pruning judges the context
        max_new_tokens: most tokens of each answer; -1: until it ends, or the longest context
        sampling: as of ask

        Returns the answers' texts, in the order of prompts: `Answers`, a list that also has why each ended. An answer does not depend on the other prompts, except
        for the order of floating-point sums. Raises kvzap.Error, naming prompt[i], for too many tokens.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts: expected a list of texts, found str")
        return Answers(self._llm.generate(list(prompts), max_new_tokens, self._sampling("generate", sampling)))

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids of a text, without a template; int32 (tokens). Raises ValueError for text with surrogates."""
        return self._llm.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, int32 (tokens) or a list. Raises kvzap.Error for an id outside the vocabulary."""
        try:
            numbers = [operator.index(token) for token in ids]
        except TypeError:
            raise TypeError("ids: expected token ids (int32)") from None
        return self._llm.decode(numbers)

    @property
    def pruning(self) -> Pruning:
        return self._llm.pruning()

    @property
    def config(self) -> dict[str, Any]:
        """Description of the model: a dict with architecture, layers, kv_heads, query_heads, head_dim, ..."""
        return dict(self._config)

    def close(self) -> None:
        """Frees the model; it then raises kvzap.Error. Its sessions keep what they need of it."""
        self._llm.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        about = self.config
        name = os.path.basename(about["model"].rstrip("/"))
        return (f"<kvzap.LLM {name}{', closed' if self._llm.is_closed else ''}: {about['architecture']}, "
                f"{about['layers']} layers, {about['dtype']}, pruning {about['pruning']}>")
