"""Random tokenizer.json files of every kind that kvzap supports, and random texts for them."""

import copy
import json
import pathlib
import random

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden/tokenizer"
FILES = [json.loads(file.read_text()) for file in sorted(GOLDEN.glob("*/tokenizer.json"))]
REGEXES = [
    r"\p{L}+", r"\s+", r"\d{1,3}", r"[^\s\p{L}\p{N}]+", r"\s+(?!\S)|\s+", r"(?i:'s|'t|'re)", r"a|ab|abc", r"(?=a)",
    r"\p{Lu}?\p{Ll}+", r"[\r\n]+", r"\w+|[^\w\s]", r" ?\p{L}+", r".", r"(?<=a)b", r"^a", r"b$", r"[a-c&&b]", r"\p{N}",
    r"", r"x*", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{M}", r"\h",
    r" ?[^(\s|[.,!?])]+", r"[\p{L}&&[^ab]]+", r"[^a&&b]", r"[a[bc]]+", r"\W", r"[\w-]+", r"[\h]+",
    r"\b", r"\Ba", r"\Aa|b+\z", r"\A +| +\z", r"c\Z", r"\d{1,3}(?=(?:\d{3})*\b)",
]
PUBLISHED_REGEXES = [  # of GPT-4o, DeepSeek, Kimi, Ling, BLOOM, CLIP, SuperBPE
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"(?=(\d{3})+(?!\d))",
]
# tokenizers 0.23 duplicates text where a normalizer replaces or prepends nothing and another one follows.
REPLACED_REGEXES = [regex for regex in REGEXES if regex not in ("", "x*", "(?=a)", r"\b")]
ALPHABET = ("aaabbc ABd1234567890 \n\r\t.,!'’s't're-_<>|éÉe\u0301ßñ中文字かな한ñ\u1100\u1161\u00a0\u2003\u2028\u0085"
            "\U0001f600\U0001f468\u200d\u0130ſİ\u03a3\u0345½Ⅷ٣०\x00\x1c\ufb01ﬁ\u0958▁▁$+~^`")
WORDS = ["<s>", "</s>", "ab", " ab", "abc", "It's", " they're", "<|im_start|>", "1234", "  ", "\n\n", "é", "ΑΣ", "<unk>",
         "<0x41>", "<0xe4>", "▁ab", "▁ ", "!?", "…«"]
BEHAVIORS = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def chance(probability):
    return random.random() < probability


def text():
    parts = (random.choice(WORDS) if chance(0.3) else random.choice(ALPHABET)
             for _ in range(random.choice([0, 1, 2, 5, 20, 60])))
    return "".join(parts)


def byte_alphabet():
    """GPT-2's characters for the bytes 0 to 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# Parts.

def pattern(regexes, texts=(",", " ", "ab", ".", "\n", "é", "▁", "")):
    return {"Regex": random.choice(regexes)} if chance(0.7) else {"String": random.choice(texts)}


def split():
    regexes = PUBLISHED_REGEXES if chance(0.3) else REGEXES
    return {"type": "Split", "pattern": pattern(regexes), "invert": chance(0.3), "behavior": random.choice(BEHAVIORS)}


def metaspace():
    part = {"type": "Metaspace", "replacement": random.choice("▁▁▁_"), "split": chance(0.5),
            "prepend_scheme": random.choice(["always", "first", "never"])}
    if chance(0.3):
        part["add_prefix_space"] = part["prepend_scheme"] != "never"
    if chance(0.2):
        del part["split"]
    return part


def byte_level(regex=None):
    return {"type": "ByteLevel", "add_prefix_space": chance(0.3), "trim_offsets": chance(0.5),
            "use_regex": chance(0.5) if regex is None else regex}


PRE_TOKENIZERS = {
    "Split": split, "Metaspace": metaspace, "ByteLevel": byte_level,
    "Digits": lambda: {"type": "Digits", "individual_digits": chance(0.5)},
    "Punctuation": lambda: {"type": "Punctuation", "behavior": random.choice(BEHAVIORS)},
    "Whitespace": lambda: {"type": "Whitespace"},
    "WhitespaceSplit": lambda: {"type": "WhitespaceSplit"},
    "FixedLength": lambda: {"type": "FixedLength", "length": random.choice([1, 2, 5])},
    "BertPreTokenizer": lambda: {"type": "BertPreTokenizer"},
    "CharDelimiterSplit": lambda: {"type": "CharDelimiterSplit", "delimiter": random.choice(" ,a▁\n")},
}
NORMALIZERS = {
    **{name: (lambda name=name: {"type": name})
       for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "ByteLevel", "Nmt")},
    "BertNormalizer": lambda: {"type": "BertNormalizer", "clean_text": chance(0.7), "handle_chinese_chars": chance(0.7),
                               "strip_accents": random.choice([None, True, False]), "lowercase": chance(0.5)},
    "Prepend": lambda: {"type": "Prepend", "prepend": random.choice(["▁", "ab", " "])},
    "Replace": lambda: {"type": "Replace", "pattern": pattern(REPLACED_REGEXES, [" ", "ab", "\n", "▁"]),
                        "content": random.choice(["▁", "", " ", "b", "éa"])},
    "Strip": lambda: {"type": "Strip", "strip_left": chance(0.6), "strip_right": chance(0.6)},
}
DECODERS = {
    **{name: (lambda name=name: {"type": name}) for name in ("ByteFallback", "Fuse")},
    "ByteLevel": byte_level, "Metaspace": metaspace,
    "WordPiece": lambda: {"type": "WordPiece", "prefix": random.choice(["##", "##", "a"]), "cleanup": chance(0.6)},
    "BPEDecoder": lambda: {"type": "BPEDecoder", "suffix": random.choice(["</w>", "a", "b"])},
    "Strip": lambda: {"type": "Strip", "content": random.choice(" ▁ab"), "start": random.randrange(3),
                      "stop": random.choice([0, 0, 0, 1, 2])},
    "Replace": lambda: {"type": "Replace", "pattern": pattern(REPLACED_REGEXES, [" ", "ab", "▁", "é"]),
                        "content": random.choice([" ", "", "b", "é"])},
}


def some(kinds, most=3, named=None, members="pretokenizers"):
    """A part of the kind `named`, or None, one, or a Sequence of several parts of random kinds."""
    parts = [random.choice(list(kinds.values()))() for _ in range(random.randrange(most + 1))]
    if named:
        parts = parts[1:] if chance(0.5) else []
        parts.insert(random.randrange(len(parts) + 1), kinds[named]())
    if not parts:
        return None
    return parts[0] if len(parts) == 1 and chance(0.7) else {"type": "Sequence", members: parts}


def added_tokens(first, known, normalized_special=False):
    tokens = []
    for _ in range(random.randrange(4) if chance(0.5) else 0):
        flags = {name: chance(0.4) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if flags["special"] and not normalized_special:
            # tokenizers 0.23 decodes special tokens that the normalizer changes; kvzap leaves them out.
            flags["normalized"] = False
        content = random.choice(WORDS + [text() or "x"])
        if content not in known:
            # Ids without gaps: tokenizers numbers anew the tokens after one.
            known.add(content)
            tokens.append({"id": first + len(tokens), "content": content, **flags})
    return tokens


# Models.

def bpe(symbols, prefix=None, suffix=None, **settings):
    """A BPE model over these characters, with random merges."""
    tokens = list(dict.fromkeys(symbols))
    if prefix:
        tokens += [prefix + symbol for symbol in symbols]
    if suffix:
        tokens += [symbol + suffix for symbol in symbols] + [(prefix or "") + symbol + suffix for symbol in symbols]
    tokens = list(dict.fromkeys(tokens))
    known, merges = set(tokens), []
    likely = [symbol for symbol in ("a", "b", "c", " ", "▁", "\u0120", "1", "e", "ab", "é", "s") if symbol in known]
    for _ in range(random.choice([0, 5, 40])):
        left = random.choice(likely or tokens)
        right = random.choice(likely or tokens)
        if prefix:
            right = prefix + right
            if right not in known:
                continue
        merged = left + right[len(prefix or ""):]
        if len(merged) > 12:
            continue
        merges.append([left, right])
        if merged not in known:
            known.add(merged)
            tokens.append(merged)
            likely.append(merged)
            if prefix and prefix + merged not in known:
                known.add(prefix + merged)
                tokens.append(prefix + merged)
    random.shuffle(merges)
    if "<unk>" not in known and settings.get("unk_token"):
        tokens.insert(random.randrange(len(tokens)), "<unk>")
    return {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges,
            "continuing_subword_prefix": prefix, "end_of_word_suffix": suffix, "dropout": None, **settings}


def unknown_settings():
    return {"unk_token": random.choice([None, "<unk>"]), "fuse_unk": chance(0.5), "ignore_merges": chance(0.3)}


def characters(share):
    return [c for c in dict.fromkeys(ALPHABET + "…«?x") if chance(share)] or ["a"]


def unigram(share, byte_fallback):
    tokens = ["<unk>", "</s>"] + characters(share) + [w for w in WORDS if chance(0.5)]
    for _ in range(40):
        sample = text()
        begin = random.randrange(len(sample) + 1)
        tokens.append(sample[begin:begin + random.randrange(1, 6)] or "▁")
    if byte_fallback:
        tokens += BYTE_TOKENS if chance(0.7) else random.sample(BYTE_TOKENS, 200)
    # Duplicates and equal scores are allowed.
    scores = random.choice([lambda: -random.random() * 20, lambda: float(-random.randrange(6)),
                            lambda: random.random() * 20])
    return {"type": "Unigram", "vocab": [[token, scores()] for token in tokens],
            "unk_id": 0 if chance(0.9) else None, "byte_fallback": byte_fallback}


def word_piece():
    """BERT's vocabularies."""
    symbols = characters(charmap_share())
    tokens = symbols + ["##" + symbol for symbol in symbols if chance(0.8)] + ["ab", "##ab", "##bc", "It", "##'", "do", "not", "."]
    vocab = {token: number for number, token in enumerate(dict.fromkeys((["[UNK]"] if chance(0.9) else []) + tokens))}
    return {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": random.choice([100, 100, 4]), "vocab": vocab}


def word_level():
    words = dict.fromkeys(["<unk>"] + WORDS + characters(0.5) + ["ab", "abc", "It", "1234"])
    return {"type": "WordLevel", "unk_token": random.choice(["<unk>", "<unk>", "none"]),
            "vocab": {word: number for number, word in enumerate(words)}}


def charmap_share():
    return random.choice([1, 1, 0.9, 0.5])


def file(model, normalizer=None, pre_tokenizer=None, decoder=None, post_processor=None):
    vocab = model["vocab"]
    known = set(vocab) if isinstance(vocab, dict) else {token for token, _ in vocab}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": added_tokens(len(known), known) if len(known) == len(vocab) else [],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor,
            "decoder": decoder, "model": model}


def post_processor(ids):
    def pair():
        return ["x", random.choice(ids)]

    def special():
        some_ids = random.sample(ids, random.randrange(1, 3))
        return {"id": "x", "ids": some_ids, "tokens": ["t"] * len(some_ids)}

    kinds = [
        lambda: {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        lambda: {"type": "BertProcessing", "sep": pair(), "cls": pair()},
        lambda: {"type": "RobertaProcessing", "sep": pair(), "cls": pair(), "trim_offsets": True, "add_prefix_space": True},
        lambda: {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                                                        {"Sequence": {"id": "B", "type_id": 1}}],
                 "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                            {"SpecialToken": {"id": "x", "type_id": 0}}][random.randrange(2):random.randrange(2, 4)],
                 "special_tokens": {"x": special()}},
    ]
    part = random.choice(kinds)()
    return part if chance(0.5) else {"type": "Sequence", "processors": random.sample([part, kinds[0]()], 2)}


# Kinds of files.

def published():
    """A golden tokenizer, changed."""
    root = copy.deepcopy(random.choice(FILES))
    vocabulary = root["model"]["vocab"]
    if chance(0.6):
        parts = [random.choice([split, split, PRE_TOKENIZERS["Digits"]])() for _ in range(random.randrange(4))]
        root["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts + [byte_level()]}
    if chance(0.5):
        root["normalizer"] = random.choice([None, {"type": "NFC"}])
    if chance(0.5):
        root["model"]["ignore_merges"] = chance(0.5)
    if chance(0.3):
        random.shuffle(root["model"]["merges"])
    if chance(0.5):
        first = max(list(vocabulary.values()) + [token["id"] for token in root["added_tokens"]]) + 1
        known = {token["content"] for token in root["added_tokens"]} | set(vocabulary)
        root["added_tokens"] += added_tokens(first, known)
    return root


def bytes_missing():
    """Byte-level BPE without some bytes, as SmolLM2's."""
    symbols = [c for c in byte_alphabet() if chance(random.choice([0.95, 0.5]))] or ["a"]
    parts = [random.choice([split, PRE_TOKENIZERS["Digits"]])() for _ in range(random.randrange(2))]
    return file(bpe(symbols, **unknown_settings()), random.choice([None, {"type": "NFC"}]),
                {"type": "Sequence", "pretokenizers": parts + [byte_level()]}, byte_level())


def byte_fallback():
    """SentencePiece's BPE: Llama 2, Mistral, Gemma."""
    symbols = characters(charmap_share()) + (BYTE_TOKENS if chance(0.7) else random.sample(BYTE_TOKENS, 200))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = random.choice([replace, {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, replace]}, None])
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
             {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    pre_tokenizer = random.choice([None, metaspace(), {"type": "Split", "pattern": {"String": " "}, "invert": False,
                                                       "behavior": "MergedWithPrevious"}])
    return file(bpe(symbols, **{**unknown_settings(), "byte_fallback": True}), normalizer, pre_tokenizer,
                {"type": "Sequence", "decoders": steps[:random.randrange(3, 5)]})


def subwords():
    """BPE over characters with marks of continuation or ends of words."""
    prefix = random.choice([None, "##"])
    model = bpe(characters(charmap_share()), prefix, random.choice([None, "</w>"]) if prefix else "</w>",
                **unknown_settings())
    return file(model, some(NORMALIZERS, 1, members="normalizers"), some(PRE_TOKENIZERS, 2), some(DECODERS, 2, members="decoders"))


def scores():
    model = unigram(charmap_share(), chance(0.5))
    if chance(0.5):
        return file(model, some(NORMALIZERS, 2, members="normalizers"), metaspace(), metaspace())
    return file(model, some(NORMALIZERS, 2, members="normalizers"), some(PRE_TOKENIZERS, 2),
                some(DECODERS, 2, members="decoders"))


def words():
    """Models of whole words."""
    model = word_piece() if chance(0.6) else word_level()
    decoder = DECODERS["WordPiece"]() if chance(0.6) else some(DECODERS, 2, members="decoders")
    if chance(0.5):
        return file(model, NORMALIZERS["BertNormalizer"](), PRE_TOKENIZERS["BertPreTokenizer"](), decoder)
    return file(model, some(NORMALIZERS, 1, members="normalizers"), some(PRE_TOKENIZERS, 2), decoder)


def any_model():
    if chance(0.3):
        return unigram(charmap_share(), chance(0.5))
    symbols = byte_alphabet() + characters(charmap_share()) + (BYTE_TOKENS if chance(0.3) else [])
    return bpe(symbols, **{**unknown_settings(), "byte_fallback": chance(0.3)})


def with_normalizer(name):
    return file(any_model(), some(NORMALIZERS, 3, name, "normalizers"), some(PRE_TOKENIZERS, 1),
                some(DECODERS, 1, members="decoders"))


def with_pre_tokenizer(name):
    return file(any_model(), some(NORMALIZERS, 1, members="normalizers"), some(PRE_TOKENIZERS, 3, name),
                some(DECODERS, 1, members="decoders"))


def with_decoder(name):
    return file(any_model(), None, some(PRE_TOKENIZERS, 1), some(DECODERS, 3, name, "decoders"))


def with_post_processor():
    model = bpe(characters(1))
    return file(model, None, None, None, post_processor(list(range(10))))


KINDS = {
    "published": published, "bytes-missing": bytes_missing, "byte-fallback": byte_fallback, "subwords": subwords,
    "unigram": scores, "words": words, "post-processor": with_post_processor,
    **{f"normalizer-{name}": (lambda name=name: with_normalizer(name)) for name in NORMALIZERS},
    **{f"pre-tokenizer-{name}": (lambda name=name: with_pre_tokenizer(name)) for name in PRE_TOKENIZERS},
    **{f"decoder-{name}": (lambda name=name: with_decoder(name)) for name in DECODERS},
}
