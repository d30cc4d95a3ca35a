# Models of a real shape whose weights are made up: a folder that kvzap reads, and what prunes it.
import json
import pathlib
import random
import struct
import subprocess
import tempfile

import load
import memory

# One merge of two zero bytes, which no text has: each byte of a text is a token.
ZERO = "\u0100"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PATTERN = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+"
)


def byte_letters():
    """GPT-2's letters for the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, more = {}, 0
    for byte in range(256):
        if byte in shown:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + more)
            more += 1
    return [letters[byte] for byte in range(256)]


def vocabulary(config):
    """Tokens by id, and the ids of the special ones: bytes, made-up words that no text becomes, and marks."""
    size, end = config["vocab_size"], config["eos_token_id"]
    end = end if isinstance(end, int) else end[0]
    special = {"<|endoftext|>": (end - 2) % size, "<|im_start|>": (end - 1) % size, "<|im_end|>": end}
    marks = {token: text for text, token in special.items()}
    plain = iter([*byte_letters(), ZERO + ZERO, *(f"\u0120w{i}" for i in range(size))])
    tokens = [marks[i] if i in marks else next(plain) for i in range(size)]
    return tokens, special


def write_tokenizer(folder, config):
    tokens, special = vocabulary(config)
    added = [{"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for text, token in special.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None, "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens) if text not in special}, "merges": [[ZERO, ZERO]],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}))


class Shape:
    """A model that kvzap can serve: a checkpoint, or a config.json for which the rest is made up."""

    def __init__(self, config_folder, work):
        folder = pathlib.Path(config_folder)
        self.name = folder.resolve().name
        self.config = json.loads((folder / "config.json").read_text())
        self.flags = []
        if not (folder / "tokenizer.json").exists():
            made = work / self.name
            made.mkdir(parents=True, exist_ok=True)
            (made / "config.json").write_text(json.dumps(self.config))
            write_tokenizer(made, self.config)
            self.flags = ["--random-weights", "0"]
            folder = made
        self.folder = folder
        self.flags = ["-m", str(folder), *self.flags]


def surrogate_of(shape, work):
    """A random one of the shape."""
    folder = work / f"surrogate-{shape.name}"
    if not folder.exists():
        memory.write_surrogate(folder, shape.config)
    return folder


def read_tensor(path, name):
    """Values of an F32 tensor in a safetensors file."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        begin, end = header[name]["data_offsets"]
        file.seek(8 + size + begin)
        return struct.unpack(f"<{(end - begin) // 4}f", file.read(end - begin))


def threshold_of(kvzap, shape, surrogate, evict_ratio, tokens=512):
    """The threshold at which that share of the pairs of a made-up text is evicted, but for a window."""
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder) / "run.safetensors"
        text = load.words(random.Random(2), tokens)
        command = [kvzap, "run", *shape.flags, "--surrogate", surrogate, "--threshold=0", "-q", "--raw", "-p", text]
        command += ["-n", "0", "--dump", dump]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        scores = sorted(read_tensor(dump, "scores"))
    return scores[min(len(scores) - 1, round(evict_ratio * len(scores)))]
