"""kvzap leaderboard: evaluations on one page, whatever their names are."""
import base64
import hashlib
import html.parser
import json
import re
import unittest

from evaluations import TASKS, write_evaluation
from harness import KVZAP, TestCase, on_ranks, run_command

HOSTILE = '"><script>alert(1)</script>|`x`\x1b[31m\n&amp;\u202e\'_é_'


def leaderboard(*arguments, ranks=0):
    return run_command(on_ranks(ranks, [KVZAP, "leaderboard", *arguments]))


class Page(html.parser.HTMLParser):
    """Heads, cells with their values, notes and scripts; refuses whatever else could do something."""

    def __init__(self, text):
        super().__init__()
        self.heads, self.rows, self.values, self.notes, self.scripts, self.tags = [], [], [], [], [], []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        for name in attributes:
            assert not name.startswith("on") and name not in ("src", "href"), (tag, attributes)
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if tag == "tr":
            self.rows.append([])
            self.values.append([])
        if tag in ("th", "td"):
            (self.heads if tag == "th" else self.rows[-1]).append("")
            if tag == "td":
                self.values[-1].append(attributes.get("data-value"))
        if tag == "li":
            self.notes.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.tags.append("/" + tag)

    def handle_data(self, data):
        inside = self.tags[-1] if self.tags else None
        if inside == "button":
            self.heads[-1] += data
        elif inside == "bdi":
            self.rows[-1][-1] += data
        elif inside == "li":
            self.notes[-1] += data
        elif inside == "script":
            self.scripts[-1] += data


def markdown_table(text):
    """Heads and rows; a bar after a backslash is text."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [head.strip() for head in lines[0]], [[cell.strip() for cell in line] for line in lines[2:]]


class Leaderboard(TestCase):
    def succeed(self, *arguments, ranks=0):
        result = leaderboard(*arguments, ranks=ranks)
        self.assertEqual((result.code, result.err), (0, b""), result)
        return result.text

    def test_full_caches_of_several_types(self):
        """Files of others may name a full cache as they like."""
        out = self.folder / "a"
        summary = write_evaluation(out)
        for label, words in (("none@kv-type=q4", "full cache, kv type q4"), ("x", "full cache")):
            for row in summary["rows"]:
                if row["policy"] == "none":
                    row["setting"] = label
            (out / "summary.json").write_text(json.dumps(summary))
            _, rows = markdown_table(self.succeed(out))
            self.assertEqual([row[2] for row in rows if row[1] == "none"], [words])

    def test_one_evaluation(self):
        out = self.folder / "a"
        summary = write_evaluation(out)
        text = self.succeed(out)
        heads, rows = markdown_table(text)
        self.assertEqual(heads[:5], ["model", "policy", "setting", "about", "evict ratio (least to most)"])
        self.assertEqual(heads[5:], ["all prompts, % \\[95 % interval\\]", *(f"{task}, %" for task in TASKS), "KV, MB",
                                     "of full, %", "seconds"])
        by_setting = {row["setting"]: row for row in summary["rows"] if row["task"] == "all"}
        self.assertEqual(len(rows), len(by_setting))
        self.assertEqual(rows[0][1:5], ["none", "full cache", "0", "0.000"])
        self.assertEqual(rows[0][5], "100.0 \\[100.0, 100.0\\]")
        # By eighths of the evict ratio, and of the same one the best first.
        keys = []
        for row in rows:
            amount, _, evicted = row[2].partition(" (")
            name, _, number = amount.replace("evict ", "evict-").partition(" ")
            label = "none" if row[1] == "none" else f"{row[1]}@{name}={float(number):g}"
            source = by_setting[label]
            if row[1] == "kvzap":
                self.assertEqual(evicted, f"{100 * source['evict_ratio_mean']:.0f} % evicted)")
            self.assertEqual(float(row[3]), int(source["evict_ratio_mean"] * 8 + 0.5) / 8)
            self.assertTrue(row[4].startswith(f"{source['evict_ratio_mean']:.3f}"))
            self.assertTrue(row[5].startswith(f"{100 * source['accuracy']:.1f} "))
            tasks = {r["task"]: r for r in summary["rows"] if r["setting"] == label}
            self.assertEqual(row[6:9], [f"{100 * tasks[task]['accuracy']:.1f}" for task in TASKS])
            keys.append((float(row[3]), -source["accuracy"], -source["evict_ratio_mean"]))
        self.assertEqual(keys, sorted(keys))
        self.assertNotIn("\n- ", text)
        # One task alone.
        heads, rows = markdown_table(self.succeed(out, "--task", "facts"))
        self.assertEqual(heads[5:], ["facts, % \\[95 % interval\\]", "KV, MB", "of full, %", "seconds"])
        facts = {r["setting"]: r for r in summary["rows"] if r["task"] == "facts"}
        self.assertEqual([float(row[5].split()[0]) for row in rows if row[1] == "kvzap"],
                         [round(100 * facts[f"kvzap@threshold={t}"]["accuracy"], 1) for t in (-5, -4, -3)])
        self.fail_with(leaderboard(out, "--task", "fakts"), "--task fakts", "did you mean facts?")

    def test_side_by_side(self):
        a, b = self.folder / "a", self.folder / "b"
        write_evaluation(a, policies=("kvzap",))
        summary = write_evaluation(b, policies=("snapkv",), tasks=("facts", "text"), prompts=5, model="other", window=64)
        for row in summary["rows"]:
            if row["task"] == "text":  # a perplexity is no accuracy
                for name in ("accuracy", "accuracy_low", "accuracy_high"):
                    del row[name]
                row["perplexity"] = 12.345
        summary["complete"] = False
        (b / "summary.json").write_text(json.dumps(summary))
        text = self.succeed(a, b, ranks=2)
        self.assertEqual(text, self.succeed(a, b))
        heads, rows = markdown_table(text)
        self.assertEqual(heads[:2], ["evaluation", "model"])
        niah, perplexity = heads.index("niah_single, %"), heads.index("text, %")
        for row in rows:
            self.assertEqual((row[niah] == "-", row[perplexity]),
                             (row[0] == "b", "perplexity 12.35" if row[0] == "b" else "-"), row)
        for part in ("b is incomplete", "Models differ", "Prompts differ",
                     "a: 30 of niah_single, niah_noise and facts", "Options differ: window: 32 (a), 64 (b)"):
            self.assertIn(part, text)
        # One evaluation with itself has nothing to be said; of folders of the same name the paths are told.
        c = self.folder / "c" / "a"
        write_evaluation(c, policies=("snapkv",))
        text = self.succeed(a, c)
        self.assertNotIn("\n- ", text)
        self.assertIn(f"| {c} |", text.replace("\\", ""))
        self.fail_with(leaderboard(a, f"{a}/."), "same folder")
        report = json.loads(self.succeed(a, b, "--json", "-"))
        self.assertEqual((report["format"], report["format_version"]), ("kvzap.leaderboard", 1))
        self.assertEqual(len(report["rows"]), len(rows))
        self.assertEqual(len(report["notes"]), 4)
        self.assertEqual(report["rows"][0]["tasks"]["facts"]["accuracy"], 1)

    def test_hostile_names(self):
        out = self.folder / "a"
        write_evaluation(out, policies=("kvzap", HOSTILE), tasks=("facts", HOSTILE), model=HOSTILE)
        page = self.folder / "page.html"
        self.assertEqual(self.succeed(out, "-o", page), "")
        text = page.read_text()
        parsed = Page(text)
        shown = HOSTILE.replace("\x1b", "\ufffd").replace("\n", " ").replace("\u202e", "\ufffd")
        self.assertEqual({row[0] for row in parsed.rows[1:]}, {shown})
        self.assertIn(f"{shown}, %", parsed.heads)
        self.assertIn([shown, shown, "evict ratio 0.5"], [row[:3] for row in parsed.rows])
        # Nothing but the page's own script runs.
        (script,) = parsed.scripts
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        self.assertEqual(parsed.policy, f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'")
        self.assertNotIn("alert(1)</script>", text)
        self.assertNotIn("://", text)
        # Numbers sort by their values.
        ratio = parsed.heads.index("evict ratio (least to most)")
        self.assertEqual(sorted(float(v[ratio]) for v in parsed.values[1:])[0], 0)
        self.assertEqual(len(parsed.rows[1]), len(parsed.heads))
        # The same columns in Markdown, each row on one line, no markup.
        heads, rows = markdown_table(self.succeed(out))
        self.assertEqual(len(heads), len(parsed.heads))
        self.assertTrue(all(len(row) == len(heads) for row in rows))
        for part in ("<script", "\x1b", "\u202e", " `x`", "|`"):
            self.assertNotIn(part, self.succeed(out))
        self.assertEqual(self.succeed(out, "--format", "html", "-o", "-"), text)

    def test_bad_input(self):
        out = self.folder / "a"
        good = write_evaluation(out, policies=("kvzap",))
        file = out / "summary.json"

        def expect(*parts, **changes):
            file.write_text(json.dumps({**good, **changes}))
            self.fail_with(leaderboard(out), file, *parts, code=1)

        def expect_row(*parts, **changes):
            rows = [dict(row) for row in good["rows"]]
            rows[2].update(changes)
            expect(*parts, rows=rows)

        expect("format:", '"kvzap.evaluation_summary"', "'kvzap.run'", format="kvzap.run")
        expect("format_version: expected 1, found 2", format_version=2)
        expect("model: expected an object", model="x")
        expect("model.name: expected a string, found 7", model={"name": 7})
        expect("rows: expected a list that is not empty", rows=[])
        expect("rows[0]: expected an object, found 3", rows=[3])
        expect("complete: expected true or false", complete="no")
        expect("tasks[0].hash: expected a string", tasks=[{"file": "x"}])
        expect('a row of task "all"', rows=[row for row in good["rows"] if row["task"] != "all"])
        expect_row("rows[2].setting: expected a string, found null", setting=None)
        expect_row("rows[2].accuracy: expected a number from 0 to 1, found 93", accuracy=93)
        expect_row("rows[2].accuracy", "'x'", accuracy="x")
        expect_row("rows[2].evict_ratio_mean: expected a number from 0 to 1, found -0.5", evict_ratio_mean=-0.5)
        expect_row("rows[2].kv_bytes: expected a number that is not negative, found null", kv_bytes=None)
        expect_row("expected a string, found [", task=["x" * 1000])
        for text, part in (("{", "not valid JSON"), ("[]", "expected a JSON object"), ("[" * 9999, "nested too deeply"),
                           ('{"format": 1, "format": 2}', "more than once")):
            file.write_text(text)
            self.fail_with(leaderboard(out), file, part, code=1)
        file.unlink()
        self.fail_with(leaderboard(out, ranks=2), file, "no such file")
        self.fail_with(leaderboard(self.folder / "none"), "none/summary.json: no such file", code=1)
        file.write_text(json.dumps(good))
        (out / "evaluation.json").write_text('{"format": "kvzap.run"}')
        self.fail_with(leaderboard(out), "evaluation.json: format:", code=1)
        (out / "evaluation.json").unlink()
        self.assertEqual(leaderboard(out).code, 0)

    def test_options(self):
        out = self.folder / "a"
        write_evaluation(out, policies=("kvzap",))
        self.fail_with(leaderboard(), "no evaluations", code=2)
        self.fail_with(leaderboard(out, "-o", self.folder / "page.txt"), ".md or .html", "--format", code=2)
        self.fail_with(leaderboard(out, "-o", self.folder), "is a folder", code=2)
        self.fail_with(leaderboard(out, "--format", "pdf"), "--format", "html", code=2)
        self.fail_with(leaderboard(out, "-o", self.folder / "no" / "page.md"), "-o", "no/page.md", code=1)
        self.fail_with(leaderboard(out, "-o", self.folder / "x.md", "--json", f"{self.folder}/./x.md"), "name the same file",
                       code=2)
        page = self.folder / "page.txt"
        self.succeed(out, "-o", page, "--format", "markdown")
        self.assertEqual(page.read_text(), self.succeed(out))
        deck = self.folder / "deck.toml"
        deck.write_text('task = "facts"\nformat = "html"\n')
        self.assertIn("<!DOCTYPE html>", self.succeed(out, "--config", deck))


if __name__ == "__main__":
    unittest.main()
