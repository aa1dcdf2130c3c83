import figures
import matplotlib.image
import matplotlib.pyplot as plt
import pytest
from comparison import Comparison
from timeline import Span

CAP = 100
SPANS = [
    Span(0, 0, 0, 0, False, 0.0, 0.1, 100),
    Span(0, 1, 0, 0, False, 0.1, 0.2, 100),
    Span(0, 1, 0, 0, True, 0.2, 0.4, 100),
    Span(0, 0, 0, 0, True, 0.4, 0.6, 100),
    Span(1, 0, 0, 0, False, 0.0, 0.05, 0),
    Span(1, 1, 0, 0, False, 0.05, 0.1, 50),
]


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they are saved."""
    saved = []
    save = figures.save

    def keep(figure, out):
        saved.append(figure)
        save(figure, out)

    monkeypatch.setattr(figures, "save", keep)
    return saved


def test_one_box_a_pass_one_row_a_rank_and_stage(tmp_path, drawn):
    figures.draw_micro_batches(SPANS, CAP, "a step", tmp_path / "deep" / "out.png")
    assert matplotlib.image.imread(tmp_path / "deep" / "out.png").std() > 0.05
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "data 0, stage 0",
        "data 0, stage 1",
        "data 1, stage 0",
        "data 1, stage 1",
    ]
    boxes = [(int(box.get_y()), round(box.get_x()), round(box.get_width())) for box in axes.patches]
    assert boxes == [
        (0, 0, 100),
        (1, 100, 100),
        (1, 200, 200),
        (0, 400, 200),
        (2, 0, 50),
        (3, 50, 50),
    ]
    assert [bool(box.get_hatch()) for box in axes.patches] == [False] * 4 + [True, False]
    assert "placeholder" in [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert axes.get_xlim()[1] == pytest.approx(600)


def test_emptier_micro_batches_are_paler_and_passes_differ():
    full, half = figures._colour(SPANS[0], CAP), figures._colour(SPANS[5], CAP)
    assert all(paler > deeper for paler, deeper in zip(half, full, strict=True))
    assert figures._colour(SPANS[2], CAP) != full


def test_boxes_carry_slots_and_the_chunk_only_where_there_are_several(tmp_path, drawn):
    figures.draw_micro_batches(SPANS, CAP, "a step", tmp_path / "out.png")
    assert {text.get_text() for text in drawn[0].axes[0].texts} == {"0"}
    interleaved = [*SPANS, Span(0, 0, 1, 3, False, 0.6, 0.7, 10)]
    figures.draw_micro_batches(interleaved, CAP, "a step", tmp_path / "out.png")
    assert {text.get_text() for text in drawn[1].axes[0].texts} == {"0a", "3b"}


def test_comparison_lays_both_curves_and_the_times_side_by_side(tmp_path, drawn):
    comparison = Comparison(
        losses=([0.5, 0.25, 0.125], [0.5, 0.25, 0.25]),
        step_seconds=([3.0, 1.0, 1.0], [3.0, 2.0, 2.0]),
        largest_loss_difference=0.125,
        largest_loss=0.5,
        median_step_seconds=(1.0, 2.0),
        median_forward_only_seconds=(1.0, 3.0),
    )
    figures.draw_comparison(comparison, tmp_path / "out.png")
    losses, differences, seconds = drawn[0].axes
    assert [list(line.get_ydata()) for line in losses.lines] == list(comparison.losses)
    assert [list(line.get_ydata()) for line in seconds.lines] == list(comparison.step_seconds)
    assert list(differences.lines[0].get_ydata()) == [0, 0, 0.125]
    assert "1.2e-01" in differences.get_title(loc="left")
    assert "2.00" in seconds.get_title(loc="left")
    assert len(drawn[0].legends[0].get_texts()) == 2


def test_figures_are_closed_again(tmp_path):
    before = plt.get_fignums()
    figures.draw_micro_batches(SPANS, CAP, "a step", tmp_path / "out.png")
    assert plt.get_fignums() == before
