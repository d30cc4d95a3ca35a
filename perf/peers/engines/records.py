"""Command line and records of the programs in this folder. A record is one answered prompt under one setting:

  engine, version  name and version of the engine
  setting          name of the setting
  id, task         those of the prompt
  answer           text of the new tokens, without the stop token
  prompt_tokens    tokens of the prompt
  new_tokens       tokens that the engine drew, the stop token included
  evict_ratio      share of the prompt's tokens that the engine evicted
  kv_bytes         most bytes of K and V that the sequence occupied at one time
  kv_bytes_end     those at the end of the generation
  kv_bytes_full    those of all tokens in 16 bits
  prefill_seconds  from the request to the first new token
  decode_seconds   from the first to the last new token

The docstring of each program says how it determines bytes, evict ratio and seconds.
"""
import argparse
import json
import pathlib
import sys

FIELDS = {"id": str, "task": str, "ids": list, "max_new_tokens": int, "stop_ids": list}


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def prompts(options):
    """The first --max-prompts rows of --prompts. Throws ValueError if a row lacks a field or has it of another type."""
    rows = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()][:options.max_prompts]
    for number, row in enumerate(rows, 1):
        for field, kind in FIELDS.items():
            if not isinstance(row.get(field), kind):
                found = type(row[field]).__name__ if field in row else "no such field"
                raise ValueError(f"{options.prompts}:{number}: {field}: expected {kind.__name__}, found {found}")
    return rows


def longest(options):
    """Tokens of the longest prompt with its answer."""
    return max(len(row["ids"]) + row["max_new_tokens"] for row in prompts(options))


def check_settings(options, known):
    """Throws ValueError if --settings names another than the known ones."""
    for setting in options.settings:
        if setting not in known:
            raise ValueError(f"--settings: expected {', '.join(known)}, found {setting}")


def matched_share(answer, expected):
    """Share of the expected texts, one or a list, that the answer contains in any case (RULER's string_match_all)."""
    expected = expected if isinstance(expected, list) else [expected]
    return sum(str(text).lower() in answer.lower() for text in expected) / len(expected)


def run(engine, options):
    rows = prompts(options)
    done = {(record["setting"], record["id"]) for record in read(options.output)}
    if all((name, row["id"]) in done for name in options.settings for row in rows):
        return
    runner = engine(options)
    with open(options.output, "a", encoding="utf-8") as output:
        for name in options.settings:
            for row in rows:
                if (name, row["id"]) in done:
                    continue
                try:
                    fields = runner.answer(name, row)
                except (RuntimeError, ValueError) as error:
                    raise RuntimeError(f"{name}: {row['id']}: {error}") from error
                record = {"engine": runner.name, "version": runner.version, "setting": name, "id": row["id"],
                          "task": row["task"], **fields}
                output.write(json.dumps(record, ensure_ascii=False) + "\n")
                output.flush()
            print(f"{runner.name}: {name}", file=sys.stderr, flush=True)


def main(description, engine, settings):
    """Answers every prompt under every setting, and appends a record for each to --output; those that it has already are
    not done again. Ends with one line and status 1 on errors. `engine` is a class: engine(options), .name, .version,
    .answer(setting, row) -> fields of a record; options.settings is a list. engine(options) throws ValueError if there
    is no such setting."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of all settings and exit")
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--surrogate", type=pathlib.Path, help="of kvzap, where the engine has it")
    parser.add_argument("--prompts", type=pathlib.Path, help="JSON lines: id, task, ids, max_new_tokens, stop_ids")
    parser.add_argument("--settings", help="between commas; default: all")
    parser.add_argument("--output", type=pathlib.Path, help="JSON lines of records")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-prompts", type=int)
    options = parser.parse_args()
    if options.list:
        print("\n".join(settings()))
        return
    if not (options.model and options.prompts and options.output):
        parser.error("needs --model, --prompts and --output")
    options.settings = options.settings.split(",") if options.settings else settings()
    try:
        run(engine, options)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        # OpenVINO names a place in its source on the first line.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"{pathlib.Path(sys.argv[0]).name}: {' '.join(lines) or type(error).__name__}", file=sys.stderr)
        sys.exit(1)
