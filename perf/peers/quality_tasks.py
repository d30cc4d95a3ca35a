"""Task files that perf/peers/quality makes from documents: facts, summaries and continuations.

The documents are those that scripts/real_texts.py reserves for evaluation (texts in English, one file a
document). Passages are drawn evenly over the documents, with a seed, and do not overlap.
"""
import array
import collections
import json
import random
import re
import subprocess

# Documents whose sentences a small model can quote; dictionaries and source code are left out.
DOCUMENTS = ("debian-handbook.1", "developers-reference.1", "cfi-en.1", "debian-history.1", "apache2-doc.1",
             "r-cran-janeaustenr.1", "r-cran-janeaustenr.2", "debian-faq.1", "zsh-doc.1")
BEGINNING = re.compile(r"[A-Z][\w ,;:'’()“”\"/-]+")  # plain words, no listings
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# A number, perhaps with units or dots, or one to three capitalised words.
FACT = re.compile(r"\b(?:\d[\d.,:/-]*\d|[A-Z][a-z]{2,}(?: [A-Z][a-z]+){0,2})\b")


def passages(folder, characters, count, seed, documents=DOCUMENTS):
    """[(document, text)]: count passages of about so many characters, whole paragraphs, in the order drawn."""
    draw = random.Random(f"{seed} {characters}")
    pools = {}
    for name in documents:
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        pool, begin = [], 0
        while begin + characters <= len(text):
            end = text.rfind("\n\n", begin + characters // 2, begin + characters)
            end = end if end > 0 else begin + characters
            pool.append(text[begin:end].strip())
            begin = end
        draw.shuffle(pool)
        pools[name] = pool
    drawn = []
    while len(drawn) < count:
        for name, pool in pools.items():
            if pool and len(drawn) < count:
                drawn.append((name, pool.pop()))
        if not any(pools.values()):
            raise SystemExit(f"{folder}: {len(drawn)} passages of {characters} characters; expected {count}")
    return drawn


def facts_of(text, protected=900):
    """[(beginning of a sentence, fact)]: the fact is a number or a name that the passage has once. The last
    `protected` characters have no fact, because every policy with a window keeps them."""
    found = []
    flat = re.sub(r"\s+", " ", text)
    sentences = [sentence for paragraph in text[:-protected].split("\n\n")
                 for sentence in SENTENCE.split(re.sub(r"\s+", " ", paragraph))]
    for sentence in sentences:
        if not 40 <= len(sentence) <= 400:
            continue
        for match in FACT.finditer(sentence):
            beginning, fact = sentence[:match.start()].rstrip(), match.group()
            if (BEGINNING.fullmatch(beginning) and len(beginning.split()) >= 5 and flat.count(fact) == 1
                    and flat.count(beginning) == 1):
                found.append((beginning, fact))
                break
    return found


def facts(folder, count, seed, per_passage=2, characters=4200):
    """Rows that ask for a sentence of the passage. The answer begins with the sentence's words up to a number or a
    name that stands once in the passage; the model must go on with it."""
    draw, rows = random.Random(f"{seed} facts"), []
    for document, text in passages(folder, characters, 4 * count, seed):
        found = facts_of(text)
        if len(found) < per_passage:
            continue
        for beginning, fact in draw.sample(found, per_passage):
            rows.append({
                "task": "facts", "id": f"{document}/{len(rows)}", "context": f"Read this text.\n\n{text}\n\n",
                "question": "Quote one sentence of the text, word for word.",
                "answer_prefix": '"' + beginning, "answer": [fact], "metric": "string_match_part", "max_new_tokens": 12})
            if len(rows) == count:
                return rows
    raise SystemExit(f"{folder}: {len(rows)} facts; expected {count}")


def without_context(rows):
    """The same questions without their documents: the floor of what the model knows or guesses."""
    return [{**row, "task": row["task"] + "-closed", "context": "", "id": row["id"] + "/closed"} for row in rows]


def summaries(folder, count, seed, characters=6000):
    """Rows that ask for a summary. The full cache's own answers become the references."""
    return [{"task": "summary", "id": f"{document}/{number}", "context": f"Read this text.\n\n{text}\n\n",
             "question": "Summarise the text in three sentences.", "answer": ["-"], "metric": "rouge_l",
             "max_new_tokens": 96}
            for number, (document, text) in enumerate(passages(folder, characters, count, seed))]


def continuations(folder, name, count, seed, context, continuation):
    """Rows whose perplexity is that of a passage's second part (characters), given the first."""
    rows = []
    for number, (document, text) in enumerate(passages(folder, int(1.25 * (context + continuation)), count, seed)):
        text = text[:context + continuation]
        cut = text.rfind(" ", 0, context)
        rows.append({"task": name, "id": f"{document}/{number}", "context": text[:cut], "question": "",
                     "answer": [text[cut:]], "metric": "perplexity"})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def examples(folder):
    """{name: text of about 2,000 tokens}: a sentence that repeats, a novel, and a list of a shell's options."""
    repeated = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    plain = (folder / "r-cran-janeaustenr.1.txt").read_text(encoding="utf-8")
    dense = (folder / "zsh-doc.1.txt").read_text(encoding="utf-8")
    half = len(dense) // 2
    return {"repetitive": repeated * 80, "plain": plain[20000:28300], "dense": dense[half:half + 7300]}


def dump(quality, context, name, arguments):
    """The tensors of `kvzap run --dump` over a context."""
    file, tensors = quality.work / f"{name}.txt", quality.work / f"{name}.safetensors"
    file.write_text(context, encoding="utf-8")
    quality.run([quality.options.kvzap, "run", "-q", *quality.model, "-f", file, "-n", "0", "--dump", tensors,
                 *arguments], output=subprocess.DEVNULL)
    raw = tensors.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])

    def tensor(name):
        begin, end = header[name]["data_offsets"]
        return array.array({"I32": "i", "F32": "f"}[header[name]["dtype"]], raw[8 + size + begin:8 + size + end])

    result = {key: (header[key]["shape"], tensor(key)) for key in ("context_ids", "question_ids", "scores") if key in header}
    file.unlink()
    tensors.unlink()
    return result


def score_quantiles(quality, policy, ratios, window=128):
    """Thresholds under which a policy evicts these shares of other passages, whose last `window` tokens stay."""
    scores, tokens = [], []
    for number, (_, text) in enumerate(passages(quality.options.texts, 4200, 4, quality.options.seed + 1000)):
        (_, _, length), values = dump(quality, text, f"scores-{number}", ["--policy", policy, "--threshold=-inf"])["scores"]
        tokens.append(length)
        for begin in range(0, len(values), length):
            scores += values[begin:begin + length - window]
    scores.sort()
    share = len(tokens) * window / sum(tokens)
    return [scores[min(len(scores) - 1, int(ratio / (1 - share) * len(scores)))] for ratio in ratios]


def engine_prompts(quality):
    """Writes engines.jsonl: token ids of the first prompts of each task of ruler-1024, and the rows themselves."""
    path, taken, rows = quality.work / "engines.jsonl", collections.Counter(), []
    if path.exists():
        return
    for line in quality.ruler(1024).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        taken[row["task"]] += 1
        if taken[row["task"]] > quality.options.engine_prompts:
            continue
        ids = dump(quality, row["context"], "prompt", ["--question", row["question"]])
        prefix = dump(quality, row["answer_prefix"], "prefix", ["--raw"])["context_ids"][1] if row["answer_prefix"] else []
        rows.append({**row, "ids": [*ids["context_ids"][1], *ids["question_ids"][1], *prefix], "max_new_tokens": 64,
                     "stop_ids": [2]})
    write(path, rows)
