#!/usr/bin/env python3
"""Cuts texts from documents of Debian packages, for scripts/train-real-model.

Reads a table of sources (inputs/real-texts.toml), downloads their packages with apt-get, unpacks
them below --cache without installing them, and writes to --output:
  train.jsonl, holdout.jsonl   passages: text, subset (the package), document, kind, language
  evaluate/PACKAGE.N.txt       whole documents, reserved for evaluation
  texts.json                   packages, versions, and numbers of texts and documents
The same table and packages give the same texts.
"""

import argparse
import gzip
import html.parser
import json
import os
import random
import re
import struct
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path


class HtmlText(html.parser.HTMLParser):
    """Collects the readable text of a page: one line a block, preformatted text as it is."""

    HIDDEN = {"script", "style", "head", "nav", "noscript", "form", "button"}
    BLOCKS = {"p", "div", "li", "tr", "table", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "pre",
              "ul", "ol", "dl", "section", "blockquote", "hr"}
    VOID = {"br", "hr", "img", "meta", "link", "input", "col", "base", "area"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.hidden, self.pre = [], [], 0

    def handle_starttag(self, tag, attrs):
        classes = dict(attrs).get("class") or ""
        outside = tag in self.HIDDEN or re.search(r"\b(sphinxsidebar|navheader|navfooter|related)\b", classes)
        if self.hidden or outside:
            if tag not in self.VOID:
                self.hidden.append(tag)
            return
        self.pre += tag == "pre"
        if tag in self.BLOCKS or tag == "br":
            self.parts.append("\n\n" if tag in {"p", "pre", "h1", "h2", "h3", "h4"} else "\n")
        elif tag in {"td", "th"}:
            self.parts.append(" ")

    def handle_endtag(self, tag):
        if self.hidden:
            # Elements that nobody closed end with the one around them.
            if tag in self.hidden:
                while self.hidden.pop() != tag:
                    pass
            return
        if tag == "pre" and self.pre:
            self.pre -= 1
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self):
        return "".join(self.parts)


def text_of_html(data):
    declared = re.search(rb"charset=[\"']?([\w-]+)", data[:2000])
    parser = HtmlText()
    parser.feed(decode(data, declared.group(1).decode() if declared else "utf-8"))
    parser.close()
    return parser.text()


def text_of_man(data):
    """Formats a manual page as `man` shows it, without hyphenation and adjusted lines."""
    page = b".nr HY 0\n.nh\n.ad l\n" + data
    run = subprocess.run(["groff", "-K", "utf8", "-mandoc", "-Tutf8", "-rHY=0", "-rLL=88n", "-P-cbou"],
                         input=page, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return run.stdout.decode("utf-8", "replace")


def texts_of_rdb(data):
    """Returns the character vectors of an R database, one text each with a line per string."""
    texts, at = [], 0
    while at + 5 < len(data):
        inflate = zlib.decompressobj()
        value = inflate.decompress(data[at + 4:])  # 4 bytes: size of the value
        at = len(data) - len(inflate.unused_data)
        lines, i = [], value.find(b"\0\0\0\x10")  # 16: a vector of strings
        if i < 0:
            continue
        count = struct.unpack_from(">i", value, i + 4)[0]
        i += 8
        for _ in range(count):
            length = struct.unpack_from(">i", value, i + 4)[0]
            lines.append(value[i + 8:i + 8 + max(length, 0)].decode("utf-8", "replace"))
            i += 8 + max(length, 0)
        texts.append("\n".join(lines))
    return texts


def decode(data, charset="utf-8"):
    try:
        return data.decode(charset)
    except (UnicodeDecodeError, LookupError):
        return data.decode("latin-1")


def tidy(text):
    text = text.replace("\r\n", "\n").replace("\0", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class Source:
    """One entry of the table, with its unpacked package."""

    def __init__(self, entry, cache):
        self.entry, self.cache = entry, cache
        self.package, self.use = entry["package"], entry["use"]
        self.root = cache / "packages" / self.package
        self.version = ""

    def unpack(self):
        debs = self.cache / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        wanted = f"{self.package}={self.entry['version']}"
        if not list(debs.glob(f"{self.package}_*.deb")):
            for name in (wanted, self.package):
                run = subprocess.run(["apt-get", "download", "-qq", name], cwd=debs, stderr=subprocess.PIPE, text=True)
                if run.returncode == 0:
                    break
            else:
                sys.exit(f"real_texts: cannot download {self.package}: {run.stderr.strip()}")
        deb = sorted(debs.glob(f"{self.package}_*.deb"))[-1]
        self.version = subprocess.run(["dpkg-deb", "-f", deb, "Version"], stdout=subprocess.PIPE, text=True,
                                      check=True).stdout.strip()
        if self.version != self.entry["version"]:
            print(f"real_texts: {self.package}: version {self.version} instead of {self.entry['version']}",
                  file=sys.stderr)
        if not self.root.exists():
            part = self.root.with_name(self.package + ".part")
            part.mkdir(parents=True, exist_ok=True)
            subprocess.run(["dpkg-deb", "-x", deb, part], check=True)
            part.rename(self.root)

    def files(self):
        found = set()
        for pattern in self.entry["files"]:
            found.update(p for p in self.root.glob(pattern) if p.is_file() and not p.is_symlink())
        if not found:
            sys.exit(f"real_texts: {self.package} {self.version}: no file matches {self.entry['files']}")
        return sorted(found)

    def documents(self, path):
        """Returns (name, text) of each document of a file."""
        data = path.read_bytes()
        if path.suffix in {".gz", ".dz"}:
            data = gzip.decompress(data)
        name = str(path.relative_to(self.root))
        form = self.entry["format"]
        if form == "rdb":
            texts = texts_of_rdb(data)
            return [(f"{name}#{i}", tidy(texts[i - 1])) for i in self.entry["values"]]
        convert = {"text": decode, "html": text_of_html, "man": text_of_man}[form]
        if form == "man" and data.startswith(b".so "):
            return []  # refers to another page
        return [(name, tidy(convert(data)))]


def passages(text, token, tokens, draw):
    """Cuts a document into passages that end at line ends, of about tokens[0] to tokens[1] tokens."""
    found, at = [], 0
    while True:
        length = int(draw.uniform(*tokens) * token)
        if at + length > len(text):
            return found
        end = text.rfind("\n", at + length * 9 // 10, at + length)
        if end < 0:
            end = text.rfind(" ", at + length * 9 // 10, at + length)
        if end < 0:
            end = at + length
        found.append(text[at:end].strip("\n"))
        at = end + 1


def cut(source, seed, tokens):
    """Returns the source's texts: a passage of every document first, then second passages, and so on."""
    draw = random.Random(f"{seed} {source.package} {source.use}")
    files = source.files()
    draw.shuffle(files)
    wanted = source.entry["texts"]
    cuts = []
    for path in files:
        for name, text in source.documents(path):
            parts = passages(text, source.entry["token"], tokens, draw)
            if parts:
                draw.shuffle(parts)
                cuts.append((name, parts))
        if len(cuts) >= wanted:
            break
    texts = []
    for turn in range(max((len(parts) for _, parts in cuts), default=0)):
        for name, parts in cuts:
            if turn < len(parts) and len(texts) < wanted:
                texts.append({"text": parts[turn], "subset": source.package, "document": name,
                              "kind": source.entry["kind"], "language": source.entry["language"]})
    if len(texts) < wanted:
        print(f"real_texts: {source.package} gives {len(texts)} texts of {wanted}", file=sys.stderr)
    return texts


def write_reserved(source, folder):
    """Writes the documents for evaluation: a novel or manual is one, all files of a package joined."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [d for path in source.files() for d in source.documents(path)]
    if source.entry["format"] != "rdb":
        documents = [(documents[0][0], "\n".join(text for _, text in documents))]
    for number, (_, text) in enumerate(documents, 1):
        (folder / f"{source.package}.{number}.txt").write_text(text)
    return len(documents)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=Path(__file__).parent / "../inputs/real-texts.toml")
    parser.add_argument("--cache", type=Path, required=True, help="folder for packages")
    parser.add_argument("--output", type=Path, required=True, help="folder for texts")
    args = parser.parse_args()
    table = tomllib.loads(args.table.read_text())
    args.output.mkdir(parents=True, exist_ok=True)
    texts = {"train": [], "holdout": []}
    report = []
    for entry in table["source"]:
        source = Source(entry, args.cache.resolve())
        source.unpack()
        row = {k: entry[k] for k in ("package", "use", "kind", "language")} | {"version": source.version}
        if source.use == "evaluate":
            row["documents"] = write_reserved(source, args.output / "evaluate")
        else:
            cuts = cut(source, table["seed"], table["tokens"])
            row |= {"texts": len(cuts), "documents": len({t["document"] for t in cuts})}
            texts[source.use] += cuts
        report.append(row)
    for use, cuts in texts.items():
        random.Random(f"{table['seed']} {use}").shuffle(cuts)
        lines = "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in cuts)
        part = args.output / f"{use}.jsonl.part"
        part.write_text(lines)
        os.replace(part, args.output / f"{use}.jsonl")
    (args.output / "texts.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(texts['train'])} texts for training, {len(texts['holdout'])} held out, "
          f"{sum(r['documents'] for r in report if r['use'] == 'evaluate')} documents reserved for evaluation")


if __name__ == "__main__":
    main()
