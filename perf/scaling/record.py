# Records the kept rows of each KV head: runs `kvzap run` on texts, and condenses its reports.
import json
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Name of a recording -> model ("{model}": that of --model), surrogate, window, thresholds or ratios, texts.
RECORDINGS = {
    "demo": {
        "model": "inputs/models/recall-4m",
        "surrogate": "inputs/models/kvzap-mlp-recall-4m",
        "window": 32,
        "amounts": [["--threshold", "-3.4"]],
        "texts": ["inputs/demo-context.txt", "docs/README.md"],
    },
    "smollm2": {
        "model": "{model}",
        "surrogate": "inputs/models/kvzap-mlp-smollm2-135m-instruct",
        "window": 128,
        "amounts": [["--threshold", "auto"], ["--evict-ratio", "0.5"]],
        "texts": ["LICENSE", "docs/reference/report.md", "docs/guide/serve.md", "docs/guide/your-model.md"],
    },
}


def command_of(recording, kvzap, model, text, amount):
    return [str(kvzap), "run", "-m", recording["model"].format(model=model), "-f", text, "-n", "1", "--window",
            str(recording["window"]), "--surrogate", recording["surrogate"], *amount,
            "--question", "What is this document about?"]


def run_one(command):
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "run.json"
        subprocess.run([*command, "--json", str(report), "-q"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(report.read_text())["context"]


def record(kvzap, model, names):
    """Returns {name: {window, prompts: [{text, amount, tokens, evict_ratio, kept_rows}]}}."""
    result = {}
    for name in names:
        recording = RECORDINGS[name]
        prompts = []
        for amount in recording["amounts"]:
            for text in recording["texts"]:
                command = command_of(recording, kvzap, model, text, amount)
                context = run_one(command)
                print(f"{name}: {text} {' '.join(amount)}: {context['tokens']} tokens, "
                      f"{context['evict_ratio']:.3f} evicted", flush=True)
                prompts.append({"text": text, "amount": " ".join(amount), "tokens": context["tokens"],
                                "evict_ratio": round(context["evict_ratio"], 4), "kept_rows": context["kept_rows"]})
        command = command_of(recording, "kvzap", "SmolLM2-135M-Instruct.Q4_1.gguf", "TEXT", ["AMOUNT"])
        result[name] = {"command": " ".join(command[:-1]) + f' "{command[-1]}"', "window": recording["window"],
                        "prompts": prompts}
    return result


def text_of(recordings):
    """Returns the JSON of recordings with one line for each prompt."""
    lines = []
    for name, recording in recordings.items():
        prompts = ",\n  ".join(json.dumps(prompt) for prompt in recording["prompts"])
        lines.append(f'"{name}": {{"command": {json.dumps(recording["command"])}, "window": {recording["window"]}, '
                     f'"prompts": [\n  {prompts}]}}')
    return "{" + ",\n".join(lines) + "}\n"
