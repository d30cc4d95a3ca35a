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


def label_words(row):
    """The setting of a summary's row: (policy, amount and other settings), as kvzap eval's table shows it:
    ("kvzap", "threshold -5.506 (74 % evicted)")."""
    policy, *settings = re.split(r"(?<!\\)@", row["setting"])
    policy, *settings = (re.sub(r"\\([@;])", r"\1", part) for part in (policy, *settings))
    threshold = row.get("threshold") if is_number(row.get("threshold")) else None
    given, words = {}, []
    for part in settings:
        key, _, value = part.partition("=")
        given[key] = value
        if key == "threshold" and value != "auto" and threshold is not None:
            value = f"{threshold:.3f}"
        words.append(f"{key.replace('-', ' ')} {value}".strip())
    is_looked_up = threshold is not None and given.get("threshold", "auto") == "auto"
    if policy == "none":
        return "full cache", ", ".join(words)
    notes = [f"{100 * row['evict_ratio_mean']:.0f} % evicted"] if is_looked_up or "evict-ratio" not in given else []
    if is_looked_up:
        notes.append(f"threshold {threshold:.3f}")
    return policy, " ".join([", ".join(words), f"({', '.join(notes)})" if notes else ""]).strip()


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
