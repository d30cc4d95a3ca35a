"""Command line and records of the programs in this folder. A record is one answered prompt under one setting."""
import argparse
import json
import pathlib
import sys


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main(description, engine, settings):
    """Answers every prompt under every setting, and appends a record for each to --output; those that it has already are
    not done again. `engine` is a class: engine(options), .name, .version, .answer(setting, row) -> fields of a record."""
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
    names = options.settings.split(",") if options.settings else settings()
    rows = read(options.prompts)[:options.max_prompts]
    done = {(record["setting"], record["id"]) for record in read(options.output)}
    if all((name, row["id"]) in done for name in names for row in rows):
        return
    runner = engine(options)
    with open(options.output, "a", encoding="utf-8") as output:
        for name in names:
            for row in rows:
                if (name, row["id"]) in done:
                    continue
                record = {"engine": runner.name, "version": runner.version, "setting": name, "id": row["id"],
                          "task": row["task"], **runner.answer(name, row)}
                output.write(json.dumps(record, ensure_ascii=False) + "\n")
                output.flush()
            print(f"{runner.name}: {name}", file=sys.stderr, flush=True)
