"""Colours, sizes and axes that figures share."""
import math

# Okabe and Ito's colours, told apart with any colour vision; black is the last but one because the full cache
# is grey, yellow the last because it is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
# Their numbers have no divisor in common, so that a pair of both comes again after 88 lines.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*")
STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))
REFERENCE = "#666666"
COLUMN, PAGE = 3.3, 7.0  # inches: a column, and the width of a page of two


def use_small_type(pyplot):
    """Lines and letters for the column of a paper."""
    pyplot.rcParams.update({
        "font.size": 7, "axes.titlesize": 7, "axes.labelsize": 7, "xtick.labelsize": 6, "ytick.labelsize": 6,
        "legend.fontsize": 6.5, "axes.linewidth": 0.5, "xtick.major.width": 0.5, "ytick.major.width": 0.5,
        "xtick.major.size": 2.5, "ytick.major.size": 2.5, "lines.linewidth": 1, "lines.markersize": 3.2,
        "pdf.fonttype": 42, "savefig.dpi": 300,
        "figure.constrained_layout.w_pad": 0.035, "figure.constrained_layout.h_pad": 0.02})


# Colours that stand for the page's own ones where a figure is part of one, which may be light or dark.
PAGE_COLORS = {"#010101": "var(--ink)", "#b1b1b1": "var(--line)", "#0072B2": "var(--blue)", "#D55E00": "var(--red)",
               "#E69F00": "var(--amber)"}
KEPT, NEWEST, THRESHOLD = "#0072B2", "#E69F00", "#D55E00"


def page_of(values, limit):
    """A range that holds the values but for a few that lie very far out: (low, high)."""
    import numpy

    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = numpy.quantile(values, (0.005, 0.995)).tolist()
    reach = limit * (inner_high - inner_low)
    if reach > 0 and math.isfinite(reach):
        low, high = max(low, inner_low - reach), min(high, inner_high + reach)
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def name_ticks(axis, layers, pyplot):
    """Numbers of layers at an axis that counts those chosen."""
    if list(layers) == list(range(len(layers))) and len(layers) > 8:
        axis.set_major_locator(pyplot.MaxNLocator(8, integer=True))
    else:
        step = math.ceil(len(layers) / 16)
        axis.set_ticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
