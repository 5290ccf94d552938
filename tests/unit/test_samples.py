from inference import Output
from training.samples import marked
from training.tracking import _markdown


class Letters:
    """A tokenizer of capitals."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(65 + i) for i in ids)


def test_accepted_drafts_are_marked() -> None:
    """The prefill's token; two accepted and a bonus; a correction alone; one, cut by the limit."""
    output = Output(ids=[0, 1, 2, 3, 4, 5], accepted=[2, 0, 1])
    assert marked(output, Letters()) == "A[BC]DE[F]"
    assert marked(output, None) == " 0[ 1 2] 3 4[ 5]"
    assert marked(Output(ids=[7]), Letters()) == "H"


def test_a_table_in_markdown() -> None:
    text = _markdown(["tau", "text"], [[1.5, "a|b\nc"]])
    assert text == "| tau | text |\n| --- | --- |\n| 1.5 | a\\|b c |"
