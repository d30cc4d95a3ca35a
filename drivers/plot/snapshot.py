"""`kvzap-plot snapshot` and `text`: figures of one snapshot, or a page of them."""
import argparse
import html
import io
import os
import pathlib
import re

from .errors import PlotError, plain, tell
from .files import is_page
from .page_parts import PAGE_STYLE
from .snapshot_figures import SnapshotFigures
from .snapshot_file import Snapshot, keep_ratios, layers_of
from .style import PAGE_COLORS, use_small_type
from .text_map import missing_text, text_map


def inline_svg(figure, name, label):
    """A figure as a part of a page, in the page's colours."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Names are to be a page's own, not a figure's.
    svg = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{name}-", svg)
    for color, of_page in PAGE_COLORS.items():
        svg = re.sub(color, of_page, svg, flags=re.IGNORECASE)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


FIGURE_WORDS = {
    "kept": ("Keep ratio of every KV head", "Pairs that a KV head of a layer has, over the tokens it was given."),
    "raster": ("Kept positions", "A row for each KV head, layer by layer; dark: evicted."),
    "positions": ("Keep ratio against position", "Kept pairs over pairs, of all KV heads together."),
    "scores": ("Scores", "Of the pairs that are left, layer by layer; a file has none of evicted ones."),
}


def snapshot_page(options, pyplot, snapshot, layers, notes):
    """One page of HTML that needs nothing else."""
    ink, line = list(PAGE_COLORS)[:2]
    pyplot.rcParams.update({
        "svg.fonttype": "none", "font.family": ["DejaVu Sans", "sans-serif"], "text.color": ink,
        "axes.edgecolor": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "xtick.color": ink, "ytick.color": ink,
        "grid.color": line})
    figures = SnapshotFigures(options, pyplot, snapshot, layers)
    ratios = keep_ratios(snapshot, layers)
    parts = []
    for kind in figures.KINDS if options.kind == "all" else [k for k in [options.kind] if k != "text"]:
        if kind == "scores" and not snapshot.has_scores:
            notes.append("no histograms: the file has no scores")
            continue
        title, words = FIGURE_WORDS[kind]
        svg = inline_svg(getattr(figures, kind)(), kind, title)
        table = ""
        if kind == "kept":
            rows = "".join(f"<tr><th>{layer}" + "".join(f"<td>{ratio:.4f}" for ratio in row) + f"<td>{row.mean():.4f}"
                           for layer, row in zip(layers, ratios))
            heads = "".join(f"<th>{head}" for head in range(snapshot.n_heads))
            table = ("<details><summary>Numbers</summary><div class=scroll><table class=numbers id=ratios>"
                     f"<tr><th>layer{heads}<th>mean{rows}</table></div></details>")
        parts.append(f"<section id={kind}><h2>{title}</h2><p>{words}</p><figure>{svg}</figure>{table}</section>")
    if options.kind in ("all", "text"):
        why = missing_text(snapshot)
        if why:
            notes.append(f"no text: {why}")
        else:
            parts.append(text_map(options, snapshot, layers, notes))
    facts = {"model": snapshot.model, "policy": snapshot.policy, "pruned": snapshot.prune,
             "threshold": "" if snapshot.threshold is None else f"{snapshot.threshold:.3f}",
             "tokens": f"{snapshot.seen:,}", "keep ratio": f"{ratios.mean():.4f}",
             "layers × KV heads": f"{snapshot.n_layers} × {snapshot.n_heads}" + (
                 "" if len(layers) == snapshot.n_layers else f"; shown: layers {', '.join(map(str, layers))}"),
             "window, sinks": f"{snapshot.window:,}, {snapshot.sink:,}", "written": snapshot.text("created"),
             "format": f"version {snapshot.version}, content {snapshot.content}"}
    facts = "".join(f"<dt>{name}<dd>{html.escape(plain(value, 300))}" for name, value in facts.items() if value)
    notes_html = "".join(f"<p class=note>{html.escape(plain(note, 400))}</p>" for note in notes)
    title = html.escape(plain(options.title or f"{pathlib.Path(snapshot.name).name}: what was kept", 120))
    return (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{title}</title><style>{PAGE_STYLE}</style><h1>{title}</h1>"
            f"<dl>{facts}</dl>{notes_html}{''.join(parts)}</html>\n")


def plot_snapshot(options, pyplot):
    if options.bins is not None and options.bins < 1:
        raise PlotError(f"--bins: expected at least 1, found {options.bins}")
    use_small_type(pyplot)
    notes = []
    with Snapshot(options.files[0]) as snapshot:
        layers = layers_of(options.layer, snapshot.n_layers)
        if options.output.endswith("/") or os.path.isdir(options.output):
            drawn = snapshot_folder(options, pyplot, snapshot, layers, notes)
        elif is_page(options):
            check_kind(options, snapshot)
            drawn = snapshot_page(options, pyplot, snapshot, layers, notes)
        else:
            check_kind(options, snapshot)
            if options.kind == "text":
                raise PlotError(f"{'--kind ' if options.command == 'snapshot' else ''}text: expected an output that ends "
                                f"with .html, found {options.output}")
            if options.kind == "all" and not snapshot.has_scores:
                notes.append("no histograms: the file has no scores")
            drawn = snapshot_image(options, pyplot, snapshot, layers, options.kind)
    for note in notes:
        tell(f"{options.files[0]}: {note}")
    return drawn


def check_kind(options, snapshot):
    if options.kind == "scores" and not snapshot.has_scores:
        raise PlotError(f"{snapshot.name}: scores: expected a snapshot that has them, found content {snapshot.content}")
    if options.kind == "text" and missing_text(snapshot):
        raise PlotError(f"{snapshot.name}: {'--kind ' if options.command == 'snapshot' else ''}text: "
                        f"{missing_text(snapshot)}")


def of_kind(options, kind):
    return argparse.Namespace(**{**vars(options), "kind": kind})


def snapshot_image(options, pyplot, snapshot, layers, kind):
    figures = SnapshotFigures(of_kind(options, kind), pyplot, snapshot, layers)
    figure = getattr(figures, kind)()
    if figure._suptitle is None:
        figure.suptitle(figures.title(), fontsize=7)
    return figure


def snapshot_folder(options, pyplot, snapshot, layers, notes):
    """{file in the folder: figure or page} of one kind, or of all that the snapshot has."""
    output = pathlib.Path(options.output)
    drawn = {}
    if options.kind in ("all", "text"):
        if options.kind == "text":
            check_kind(options, snapshot)
        if missing_text(snapshot):
            notes.append(f"no text: {missing_text(snapshot)}")
        else:
            with pyplot.rc_context():
                page = snapshot_page(of_kind(options, "text"), pyplot, snapshot, layers, notes)
            drawn[str(output / "text.html")] = page
    for kind in SnapshotFigures.KINDS if options.kind == "all" else [k for k in [options.kind] if k != "text"]:
        if kind == "scores" and not snapshot.has_scores and options.kind == "all":
            notes.append("no histograms: the file has no scores")
            continue
        check_kind(options, snapshot)
        drawn[str(output / f"{kind}.{options.format or 'svg'}")] = snapshot_image(options, pyplot, snapshot, layers, kind)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlotError(f"{output}: {error.strerror or error}") from None
    return drawn


def plot_text(options, pyplot):
    options.kind, options.bins, options.column = "text", None, False
    return plot_snapshot(options, pyplot)
