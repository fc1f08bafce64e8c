"""The confusion matrix as SVG: a cell for each pair, right answers in another colour, names escaped."""

import re

from jobs.confusion_plot import confusion_plot, text_width


def test_a_cell_for_each_pair() -> None:
    right = [[True, False, False], [False, True, True]]
    plot = str(confusion_plot([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]], ["a<b", "c"], ["a<b", "c", "d"], is_right=right))
    assert re.findall(r'<rect class="([^"]+)"', plot) == ["part-1", "cell", "cell", "cell", "part-1", "part-1"]
    texts = re.findall(r">([^<]+)</text>", plot)
    assert texts == ["a&lt;b", "c", "d", "a&lt;b", "90", "10", "c", "50", "50"]
    assert "2 labels and 3 classes" in plot


def test_long_names_have_room() -> None:
    short, long = (
        re.search(r'viewBox="0 0 ([0-9]+) ([0-9]+)"', str(confusion_plot([[1.0]], [name], [name], is_right=[[True]])))
        for name in ("a", "great white sharks")
    )
    assert short is not None
    assert long is not None
    assert int(long[1]) > int(short[1]) + 100
    assert int(long[2]) > int(short[2]) + 50
    assert text_width("great white sharks") < text_width("WWWWWWWWWWWWWWWWWW") == text_width("鮫" * 18)


def test_many_classes_have_small_cells_without_numbers() -> None:
    names = [str(number) for number in range(20)]
    shares = [[float(row == column) for column in range(20)] for row in range(20)]
    plot = str(confusion_plot(shares, names, names, is_right=[[False] * 20] * 20))
    assert plot.count("<rect") == 400
    assert ">100<" not in plot
