"""Plots of what kvzap writes: the report of `kvzap run --json`, its `--snapshot` and `--dump`, `kvzap bench -o json`, of
surrogates the training.json of `kvzap train` and the thresholds.json of `kvzap calibrate`, and the folder of
`kvzap eval`.

Needs matplotlib, and h5py for snapshots (Debian: python3-matplotlib, python3-h5py).
"""
import argparse

from .bench import plot_bench
from .evaluation import EVAL_KINDS, plot_eval
from .kept import plot_kept
from .positions import plot_positions
from .scores import plot_scores
from .snapshot import plot_snapshot, plot_text
from .snapshot_figures import SnapshotFigures
from .training import plot_thresholds, plot_training


def parser():
    main = argparse.ArgumentParser(prog="kvzap-plot", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name, plot, text, file, files="+"):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("files", nargs=files, metavar=file)
        page = {"snapshot": ", or html", "text": ": html"}.get(name, "")
        command.add_argument("-o", "--output", metavar="FILE", help=(
            "a page; html" if name == "text" else f"an image; its ending says of what kind: svg, png, pdf{page}") +
            f" (default: {name}.{'html' if name == 'text' else 'svg'}, or with the ending of --format); - is standard output")
        command.add_argument("--title", metavar="TEXT", help="above the figure, in place of its own title")
        if name != "text":
            command.add_argument("--size", metavar="WxH", help="of the figure in inches, as 3.5x2.6 (default: what the "
                                 "content needs)")
            command.add_argument("--format", metavar="KIND", help="svg, png, pdf and what else matplotlib writes, whatever "
                                 "the output's ending")
        command.set_defaults(plot=plot)
        return command

    def add_layers(command):
        command.add_argument("--layer", metavar="LIST", help="these layers alone, as 3 or 0,4-6 (default: all)")

    def add_column(command):
        command.add_argument("--column", action="store_true", help="3.3 inches wide, a column of a paper; default: 7")

    def add_model(command):
        command.add_argument("--model", metavar="DIR", help="the folder whose tokenizer.json has the texts of tokens "
                             "(default: the one that the file names); without one ids are shown")

    kept = add("kept", plot_kept, "share of rows that every KV head of every layer kept", "RUN.json|CACHE.h5")
    kept.add_argument("--when", choices=("context", "end"), default="context",
                      help="after the context, or after the last answer (default: %(default)s)")
    kept.add_argument("--ratios", metavar="FILE", help="also write the mean evict ratio of every KV head over all files, as "
                      "JSON for the modifier +per-head:ratios=FILE; - is standard output")
    positions = add("positions", plot_positions,
                    "which positions of the text each layer kept, as the share of its KV heads that did", "CACHE.h5")
    positions.add_argument("--bins", type=int, default=400, help="columns of the image (default: %(default)s)")
    positions.add_argument("--by-head", action="store_true", help="a row for each KV head, not for each layer")
    snapshot = add("snapshot", plot_snapshot, "what a snapshot keeps: keep ratio of every KV head of every layer, "
                   "which positions each kept, scores and the threshold, keep ratio against position; as .html a page with "
                   "these and the text, its tokens shaded by how many heads keep them", "FILE.h5", files=1)
    snapshot.add_argument("--kind", choices=(*SnapshotFigures.KINDS, "text", "all"), default="all",
                          help="keep ratio by layer and head (kept), kept positions of every head (raster), histograms "
                          "of scores with the threshold (scores), keep ratio against position (positions), the text "
                          "(text, .html alone); default: all of them, each in a file of its own where -o names a folder")
    add_layers(snapshot)
    add_model(snapshot)
    snapshot.add_argument("--bins", type=int, metavar="N", help="columns along positions (default: up to 1000 of the "
                          "raster, 100 of the ratio)")
    add_column(snapshot)
    scores = add("scores", plot_scores, "histograms of scores, layer by layer, with the threshold: of the pairs that a "
                 "snapshot keeps, or of all pairs of the context in a dump of kvzap run --dump", "CACHE.h5|DUMP", files=1)
    add_layers(scores)
    scores.add_argument("--bins", type=int, metavar="N", help="of a dump's histograms (default: 60)")
    scores.add_argument("--threshold", type=float, metavar="X", help="to be marked in a dump's histograms; a snapshot "
                        "says its own")
    add_column(scores)
    text = add("text", plot_text, "the text as a page of HTML, its tokens shaded by how many KV heads keep them",
               "CACHE.h5", files=1)
    add_layers(text)
    add_model(text)
    add("bench", plot_bench, "tokens per second, bytes of KV and reached evict ratio against the tokens in the cache, "
        "a line for each evict ratio", "BENCH.json")
    training = add("train", plot_training, "how well a surrogate predicts: R² of every KV head of every layer, and "
                   "predicted against oracle scores of validation pairs", "TRAINING.json|FOLDER")
    training.add_argument("--by-layer", action="store_true", help="the scatter of each layer by itself")
    add("thresholds", plot_thresholds, "evict ratio against threshold, with its spread over texts", "THRESHOLDS.json|FOLDER")
    evaluation = add("eval", plot_eval, "what kvzap eval has measured: accuracy against evict ratio, the spread of "
                     "evict ratios over prompts at a threshold, and what every KV head of every layer kept", "OUT")
    evaluation.add_argument("--kind", choices=tuple(EVAL_KINDS), help="accuracy against achieved evict ratio (curve), "
                            "evict ratios of single prompts (spread), keep ratios of heads (kept); default: curve, or "
                            "all three, as SVG and PNG, where -o names a folder")
    evaluation.add_argument("--tasks", metavar="LIST", help="tasks, between commas; \"all\" is every prompt; kept: the "
                            "first of them (default: all of them; kept: \"all\")")
    evaluation.add_argument("--policies", metavar="LIST", help="policies, between semicolons (default: all)")
    evaluation.add_argument("--settings", metavar="LIST", help="spread, kept: settings by their labels, between "
                            "semicolons (default: of each policy the one that comes nearest to --evict-ratio; spread: of those "
                            "with a threshold)")
    evaluation.add_argument("--evict-ratio", type=float, default=0.75, metavar="R",
                            help="spread, kept: see --settings (default: %(default)s)")
    evaluation.add_argument("--intervals", choices=("auto", "shade", "bars", "none"), default="auto",
                            help="curve: 95 %% intervals; auto shades them for up to four policies, bars else")
    add_column(evaluation)
    return main
