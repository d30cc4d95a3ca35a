"""The text of a snapshot, its tokens shaded by how many KV heads keep them."""
import codecs
import html
import json
import pathlib

from .errors import PlotError, expect, integers, printable, shown
from .page_parts import PAGE_SCRIPT


class TokenTexts:
    """Texts of token ids, by the tokenizer.json of a model folder: byte-level BPE and added tokens."""

    def __init__(self, folder):
        file = pathlib.Path(folder) / "tokenizer.json"
        try:
            with open(file, encoding="utf-8") as stream:
                tokenizer = json.load(stream)
        except (OSError, UnicodeDecodeError) as error:
            raise PlotError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
        except (ValueError, RecursionError) as error:
            raise PlotError(f"{file}: not JSON: {error}") from None
        model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        expect(isinstance(vocabulary, dict) and integers(list(vocabulary.values())), file, "model.vocab",
               "an object of integers", type(vocabulary).__name__)
        # GPT-2's alphabet: a character for each byte, the printable ones for themselves.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        self.bytes = {}
        for token, number in vocabulary.items():
            try:
                self.bytes[number] = bytes(bytes_of[c] for c in token)
            except KeyError:
                self.bytes[number] = token.encode("utf-8", "replace")
        added = tokenizer.get("added_tokens") or []
        good = isinstance(added, list) and all(
            isinstance(t, dict) and isinstance(t.get("content"), str) and integers([t.get("id")]) for t in added)
        expect(good, file, "added_tokens", "objects with an id and a content", shown(added))
        self.bytes.update({token["id"]: token["content"].encode("utf-8", "replace") for token in added})

    def texts(self, ids):
        """A character that several tokens share the bytes of belongs to the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.bytes.get(number, f"⟨{number}⟩".encode())) for number in ids]


def kept_by(snapshot, layers):
    """Which heads keep each position, (position, layer · KV head) of 0 and 1."""
    import numpy

    masks = numpy.zeros((snapshot.tokens, len(layers) * snapshot.n_heads), numpy.uint8)
    for i, layer in enumerate(map(snapshot.layer, layers)):
        masks[layer.positions, i * snapshot.n_heads + layer.heads()] = 1
    return masks


def missing_text(snapshot):
    """Why there can be no text; empty if there can."""
    if not len(snapshot.ids):
        return "the file has no token ids"
    if snapshot.closed_up:
        return "positions were closed up after evictions, so that the file does not tell which token a pair is of"
    if len(snapshot.ids) < snapshot.tokens:
        return f"the file has {len(snapshot.ids)} token ids for {snapshot.tokens} tokens"
    return ""


def level(count, all_heads):
    """Of ten shades; 0 for no head alone."""
    return -(-10 * count // all_heads)


def text_map(options, snapshot, layers, notes):
    """The text as HTML, its tokens shaded by how many of the heads keep them."""
    import numpy

    texts = None
    try:
        texts = TokenTexts(options.model if options.model is not None else snapshot.model)
    except PlotError as error:
        if options.model is not None:
            raise
        notes.append(f"token ids are shown: {error} (--model DIR)")
    ids = snapshot.ids.tolist()
    if texts:
        pieces = [html.escape(printable(text, "\n\t").replace("\n", "↵\n")) for text in texts.texts(ids)]
    else:
        pieces = [f"{number} " for number in ids]
    masks = kept_by(snapshot, layers)
    counts = masks.sum(axis=1).tolist()
    different, which = numpy.unique(numpy.packbits(masks, axis=1), axis=0, return_inverse=True)
    newest = set()
    for layer in map(snapshot.layer, layers):
        newest.update(layer.positions[~layer.judged].tolist())
    tokens = []
    for position, (piece, number) in enumerate(zip(pieces, ids)):
        if position == snapshot.context_tokens and position:
            tokens.append('<hr title="end of the context">')
        if position < snapshot.tokens:
            classes = f"s{level(counts[position], masks.shape[1])}" + (" n" if position in newest else "")
            tokens.append(f'<b class="{classes}" data-m={which[position]} data-i={number}>{piece or "▫"}</b>')
        else:
            tokens.append(f'<b class=u data-i={number}>{piece or "▫"}</b>')
    data = {"layers": list(layers), "heads": snapshot.n_heads, "masks": [row.tobytes().hex() for row in different]}
    layer_options = "".join(f"<option value={i}>layer {layer}" for i, layer in enumerate(layers))
    head_options = "".join(f"<option value={head}>KV head {head}" for head in range(snapshot.n_heads))
    legend = "".join(f'<b class="s{n}">{text}</b>' for n, text in enumerate(
        ("none", *(f" {10 * n}% " if n in (1, 5) else "   " for n in range(1, 10)), "all")))
    shaded = f"{masks.shape[1]} KV heads" + ("" if len(layers) == snapshot.n_layers else
                                             f" of layers {', '.join(map(str, layers))}")
    more = ""
    if newest:
        more += " Underlined: among the newest, not yet judged by every head."
    if snapshot.context_tokens and snapshot.context_tokens < len(ids):
        more += " The line is the end of the context."
    if len(ids) > snapshot.tokens:
        more += " In italics: not yet in the cache."
    return f"""<section id=text><h2>Text</h2>
<p>Each token is shaded by how many of {shaded} keep it. Point at a token, or choose it, to see which.{more}</p>
<p class=tools><label>Shade by <select id=layer><option value=-1>all layers{layer_options}</select></label>
<label><select id=head aria-label="KV head"><option value=-1>all KV heads{head_options}</select></label>
<span class=legend>kept by {legend}</span></p>
<div class=two><div id=tokens dir=auto>{"".join(tokens)}</div><aside id=which aria-live=polite>
<p>No token chosen.</p></aside></div>
<script type="application/json" id=data>{json.dumps(data, separators=(",", ":"))}</script>
<script>{PAGE_SCRIPT}</script></section>"""
