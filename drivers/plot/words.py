"""Words for the titles of figures."""
import pathlib
import re

from .errors import is_number, plain


def short_policy(policy):
    """A policy without its surrogate, and without the folders of its other files."""
    return re.sub(r"=[^,;+\s]*/", "=", re.sub(r":surrogate=[^,;+\s]*(?=$|[;+\s])", "", policy))


def amount(options):
    """How much is evicted, of options by the names of flags: "threshold -4"."""
    words = {"threshold": "threshold", "evict_ratio": "evict ratio", "keep_tokens": "rows a head",
             "kv_budget_bytes": "bytes of KV", "kv_budget": "KV budget"}
    given = {name.replace("-", "_"): value for name, value in options.items()}
    for name, word in words.items():
        value = given.get(name)
        if isinstance(value, (int, float, str)) and not isinstance(value, bool) and value != "":
            return f"{word} {value:g}" if is_number(value) else f"{word} {plain(str(value), 20)}"
    return ""


def setting_words(model, policy, amount_of_it, window):
    """What a title says of a run: model; policy and how much it evicts; window."""
    parts = [pathlib.PurePath(model).name, ", ".join(w for w in (short_policy(policy), amount_of_it) if w),
             f"window {window:,}" if window and policy else ""]
    return [plain(part, 60) for part in parts if part]


def wrapped(parts, width):
    """Parts in lines of at most `width` characters, between commas."""
    lines = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines
