"""What written labels mean, and what is refused because it could be meant two ways."""

import pytest

from shards.class_labels import LabelRules, Meaning, WrittenLabels, are_names, settle, split_text
from shards.errors import ImageRefusedError, UserError

AUTO = LabelRules()
NAMES = ("ant", "bee", "cat")


def meant(
    *images: tuple[str, ...],
    rules: LabelRules = AUTO,
    listed: tuple[str, ...] | None = None,
    numbered: tuple[str, ...] = (),
    given: str = "",
    names: tuple[str, ...] = NAMES,
) -> list[tuple[str, ...] | str]:
    """The classes of each image, or why it has none. `given` names are listed or numbered."""
    if given:
        listed, numbered = (names, ()) if given == "listed" else (None, names)
    meaning = settle(rules, WrittenLabels.of(images), listed=listed, numbered=numbered)
    found = list[tuple[str, ...] | str]()
    for image in images:
        try:
            found.append(meaning.of(image)[0])
        except ImageRefusedError as refusal:
            found.append(str(refusal))
    return found


def one_each(*labels: str) -> list[tuple[str, ...]]:
    return [(label,) for label in labels]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["0", "1", "2"], ["0", "1", "2"]),
        (["0.0", "0", "007", "3.00"], ["0", "0", "007", "3"]),
        (["v1.0", "-x", "none", "Null", "nano", "(other)", "golden retriever"], None),
    ],
)
def test_labels_without_names(labels: list[str], classes: list[str] | None) -> None:
    assert meant(*one_each(*labels)) == one_each(*(classes or labels))


def test_what_is_no_label() -> None:
    none = ["-1", "-1.0", "NaN", "nan", "None", "null", "NULL", "<NA>", "NA", "N/A", "\\N"]
    assert meant(*one_each(*none), ("0",)) == [*[()] * len(none), ("0",)]
    assert meant(("-1", "1", "1"), ("0",)) == [("1",), ("0",)]
    assert meant(("-7",), ("0",)) == [(), ("0",)]


@pytest.mark.parametrize(
    ("labels", "listed"),
    [
        pytest.param(["-2", "-1", "0", "1", "2"], ("awful", "bad", "so so", "good", "great"), id="a scale"),
        pytest.param(["-2", "-1", "0", "1", "2"], None, id="a scale without names"),
        pytest.param(["-1", "1"], ("female", "male"), id="the attributes of CelebA"),
        pytest.param(["-1.0", "1"], None, id="attributes without names"),
        pytest.param(["-1", "-2", "0", "1"], ("ant", "bee", "cat"), id="one class has no image"),
    ],
)
def test_negative_numbers_that_may_be_classes_are_refused(labels: list[str], listed: tuple[str, ...] | None) -> None:
    with pytest.raises(UserError, match=r"negative numbers -.*; if these mean no label, give --labels.numbers from-0"):
        meant(*one_each(*labels), listed=listed)
    found = meant(*one_each(*labels), rules=LabelRules(numbers="from-0"), listed=listed)
    assert [len(one) for one in found] == [0 if label.startswith("-") else 1 for label in labels]


def test_what_a_labels_file_lists_is_a_class() -> None:
    names = ("None", "NA", "-1", "nan", "2.5", "[x, y]", "cat, dog", "3.0")
    assert meant(*one_each(*names), listed=names) == one_each(*names)
    assert meant(("null",), ("None",), listed=names) == [(), ("None",)]
    assert meant(("NA",), ("1",), ("0",), numbered=("NA", "bird")) == [("NA",), ("bird",), ("NA",)]


def test_a_negative_number_is_no_label_where_names_are_given_for_numbers() -> None:
    assert meant(("-1",), ("0",), ("1",), numbered=("-1", "1")) == [(), ("-1",), ("1",)]


@pytest.mark.parametrize("given", ["listed", "numbered"])
class TestNumbers:
    """Numbers are ids, whether a labels file or the source has the names."""

    def test_from_0(self, given: str) -> None:
        assert meant(("0",), ("2.0",), ("1", "2", "1"), given=given) == [("ant",), ("cat",), ("bee", "cat")]
        assert meant(("0",), ("4",), given=given) == [("ant",), "unknown label '4'"]
        assert meant(("0",), ("9" * 400,), given=given)[1] == f"unknown label '{'9' * 400}'"

    @pytest.mark.parametrize("labels", [("1", "2", "3"), ("0", "1", "3"), ("1", "3", "99"), ("1.0", "3.0")])
    def test_the_number_of_names_as_a_label_is_refused(self, given: str, labels: tuple[str, ...]) -> None:
        with pytest.raises(UserError, match=r"3 is a label, but the 3 names .* --labels\.numbers from-1, .*'ant'; "):
            meant(*one_each(*labels), given=given)

    def test_from_1(self, given: str) -> None:
        rules = LabelRules(numbers="from-1")
        assert meant(*one_each("1", "3", "0"), rules=rules, given=given) == [
            ("ant",),
            ("cat",),
            "unknown label '0'",
        ]

    def test_from_0_if_it_is_said(self, given: str) -> None:
        found = meant(*one_each("1", "3"), rules=LabelRules(numbers="from-0"), given=given)
        assert found == [("bee",), "unknown label '3'"]

    @pytest.mark.parametrize("labels", [("-1", "0", "1"), ("-1.0", "0.0", "1.0"), ("-1", "0", "1", "", "nan")])
    def test_numbers_that_may_count_from_minus_1_are_refused(self, given: str, labels: tuple[str, ...]) -> None:
        with pytest.raises(UserError):
            meant(*one_each(*labels), given=given)
        found = meant(*one_each(*labels), rules=LabelRules(numbers="from-0"), given=given)
        assert found[:3] == [(), ("ant",), ("bee",)]

    @pytest.mark.parametrize(
        ("labels", "classes"),
        [
            pytest.param(["-1", "0", "1", "2"], [(), ("ant",), ("bee",), ("cat",)], id="each class has an image"),
            pytest.param(["-1", "0", "1", "cat"], [(), ("ant",), ("bee",), ("cat",)], id="one of them by its name"),
            pytest.param(["-1", "-1"], [(), ()], id="a held-out test set"),
            pytest.param(["-1", "1", "2"], [(), ("bee",), ("cat",)], id="the last class has an image"),
            pytest.param(["-1", "0"], [(), ("ant",)], id="two classes have none"),
            pytest.param(["-1", "-2", "0", "1", "2"], [(), (), ("ant",), ("bee",), ("cat",)], id="other markers"),
            pytest.param(["0", "1"], [("ant",), ("bee",)], id="no -1"),
        ],
    )
    def test_minus_1_is_no_label(self, given: str, labels: list[str], classes: list[tuple[str, ...]]) -> None:
        assert meant(*one_each(*labels), given=given) == classes

    @pytest.mark.parametrize(("labels", "is_said"), [(("1", "2"), True), (("0", "1"), False), (("ant", "cat"), False)])
    def test_no_label_0_is_said(
        self, given: str, labels: tuple[str, ...], is_said: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        meant(*one_each(*labels), given=given)
        said = (
            "no image has label 0, which is 'ant'; the largest label is 2, 'cat'; if the labels count from 1, give --l"
        )
        assert (said in caplog.text) == is_said

    def test_numbers_as_names(self, given: str) -> None:
        """1, 2, 3 beside the ids 0, 1, 2: the images of two classes would be in one."""
        names = ("1", "2", "3")
        if given == "listed":
            with pytest.raises(UserError, match=r"the label 1 could be the name of class 0 or the number of a class"):
                meant(*one_each("0", "1"), given=given, names=names)
            assert meant(*one_each("1", "2"), given=given, names=names) == one_each("1", "2")
        else:
            assert meant(*one_each("0", "1"), given=given, names=names) == one_each("1", "2")
            with pytest.raises(UserError, match=r"the label 1 could be .* --labels\.numbers names, from-0 or from-1"):
                meant(*one_each("1", "2"), given=given, names=names)
        assert meant(*one_each("1", "2"), rules=LabelRules(numbers="names"), given=given, names=names) == one_each(
            "1", "2"
        )
        assert meant(*one_each("1", "2"), rules=LabelRules(numbers="from-0"), given=given, names=names) == one_each(
            "2", "3"
        )
        assert meant(*one_each("1", "2"), rules=LabelRules(numbers="from-1"), given=given, names=names) == one_each(
            "1", "2"
        )

    def test_numbers_that_are_their_own_names(self, given: str, caplog: pytest.LogCaptureFixture) -> None:
        names = tuple("0123456789")
        assert meant(*one_each("1", "9"), given=given, names=names) == one_each("1", "9")
        assert not caplog.text


def test_0_does_not_count_from_1() -> None:
    rules = LabelRules(numbers="from-1")
    assert meant(("1",), ("2",), rules=rules) == [("1",), ("2",)]
    with pytest.raises(UserError, match=r"'0' is a label, but --labels\.numbers is from-1"):
        meant(("0",), ("1",), rules=rules)


def test_words_for_a_missing_value_are_named(caplog: pytest.LogCaptureFixture) -> None:
    meant(("NA",), ("None",), ("cat",), (), listed=("cat", "None"))
    assert "'NA' is read as no label; if it is the name of a class, list the classes in --labels-file" in caplog.text
    caplog.clear()
    meant(("-1",), ("cat",), ())
    assert not caplog.text


def test_a_labels_file_orders_the_names_of_a_source() -> None:
    assert meant(("0",), ("1",), ("2",), numbered=NAMES, listed=("cat", "ant")) == [
        ("ant",),
        "unknown label 'bee'",
        ("cat",),
    ]


VECTORS = [("0", "1", "0"), ("1", "0", "1"), ("0", "0", "0")]


@pytest.mark.parametrize(
    "images",
    [
        [("0", "1"), ("1",), ("0",)],  # tags
        [("0", "1"), ("2", "3")],
        [("3", "3"), ("0", "0")][:1],  # given twice
        [("0",), ("1",)],
    ],
)
def test_lists_of_classes_stay(images: list[tuple[str, ...]]) -> None:
    assert meant(*images) == [tuple(dict.fromkeys(image)) for image in images]


def test_vectors_as_positions() -> None:
    rules = LabelRules(lists="positions")
    assert meant(*VECTORS, rules=rules) == [("1",), ("0", "2"), ()]
    assert meant(*VECTORS, rules=rules, listed=NAMES) == [("bee",), ("ant", "cat"), ()]
    assert meant(("0 1 0",), ("[1, 0, 1]",), rules=rules, numbered=NAMES) == [("bee",), ("ant", "cat")]
    found = meant(*VECTORS, ("0", "1"), ("-1", "1", "0"), (), rules=rules)
    assert found[3:] == [
        "its labels '0, 1' are not a vector of 3 values, each 0 or 1",
        "its labels '-1, 1, 0' are not a vector of 3 values, each 0 or 1",
        (),
    ]
    found = meant(*VECTORS, rules=rules, numbered=NAMES, listed=("cat", "bee"))
    assert found == [("bee",), "unknown label 'ant'", ()]
    assert settle(rules, WrittenLabels.of([("0", "1", "0")])).names == ("0", "1", "2")
    with pytest.raises(UserError, match="vectors of 3 values, but there are 2 names"):
        meant(*VECTORS, rules=rules, listed=("a", "b"))
    with pytest.raises(UserError, match=r"--labels\.lists is positions, but no labels are lists"):
        meant(("3",), rules=rules)


def test_vectors_as_ids() -> None:
    assert meant(*VECTORS, rules=LabelRules(lists="ids")) == [("0", "1"), ("1", "0"), ("0",)]


def test_weights_stay_with_their_labels() -> None:
    vector = settle(LabelRules(lists="positions"), WrittenLabels.of(VECTORS))
    assert vector.of(("1", "0", "1"), (0.5, 0.25, 1.0)) == (("0", "2"), (0.5, 1.0))
    with pytest.raises(ImageRefusedError, match="2 weights for a vector of 3 values"):
        vector.of(("1", "0", "1"), (0.5, 0.25))
    assert Meaning(names=None).of(("a", "NA", "b"), (0.5, 0.25, 1.0)) == (("a", "b"), (0.5, 1.0))
    with pytest.raises(ImageRefusedError, match="a label with a weight appears twice"):
        Meaning(names=None).of(("a", "a"), (0.5, 0.25))


LISTS = [
    (["['ant', 'bee']", "['cat']"], [("ant", "bee"), ("cat",)]),
    (['["ant", "polar bear"]', '["cat"]'], [("ant", "polar bear"), ("cat",)]),
    (["['polar bear' 'ant']", "[]"], [("polar bear", "ant"), ()]),
    (["('ant', 'bee')", "('cat',)"], [("ant", "bee"), ("cat",)]),
    (["{ant,bee}", "{cat}"], [("ant", "bee"), ("cat",)]),
    (["[ant, polar bear]", "cat"], [("ant", "polar bear"), ("cat",)]),
    (["[3 17]", "[5]"], [("3", "17"), ("5",)]),
    (["array([3, 17])", "array([5])"], [("3", "17"), ("5",)]),
    (["3 17", "5"], [("3", "17"), ("5",)]),
    (["3,17", "5"], [("3", "17"), ("5",)]),
    (["[3.0, 17.0, null]", "[5.0]"], [("3", "17"), ("5",)]),
    (["cat, dog", "dog", "cat"], [("cat", "dog"), ("dog",), ("cat",)]),
    (["cat;dog", "dog;ant", "ant;cat"], [("cat", "dog"), ("dog", "ant"), ("ant", "cat")]),
    (["ant, bee", "bee", "cat"], [("ant", "bee"), ("bee",), ("cat",)]),
    (["cat|dog", "dog", "cat"], [("cat", "dog"), ("dog",), ("cat",)]),
]


@pytest.mark.parametrize(("labels", "classes"), LISTS, ids=lambda value: str(value[0]))
def test_lists_in_text(labels: list[str], classes: list[tuple[str, ...]]) -> None:
    with pytest.raises(UserError, match=r"lists written as text, such as .* lists; .*: --labels\.text names"):
        meant(*one_each(*labels))
    assert meant(*one_each(*labels), rules=LabelRules(text="lists")) == classes
    kept = [label for label in labels if label.removesuffix(".0") != "5"]
    assert meant(*one_each(*kept), rules=LabelRules(text="names")) == one_each(*kept)


def test_lists_in_text_of_known_names() -> None:
    with pytest.raises(UserError):
        meant(("['ant', 'bee']",), ("ant",), listed=NAMES)
    rules = LabelRules(text="lists")
    assert meant(("['ant', 'bee']",), ("[1, 0]",), rules=rules, listed=NAMES) == [("ant", "bee"), ("bee", "ant")]
    assert meant(("a, b",), rules=rules, listed=("a, b",)) == [("a, b",)]


def test_names_with_a_comma_stay_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    labels = ["tench, Tinca tinca", "maillot", "maillot, tank suit", "great white shark, white shark, man-eater"]
    assert meant(*one_each(*labels)) == one_each(*labels)
    assert "such as 'great white shark, white shark, man-eater'; it is one class; if it is a list: --labels.text l" in (
        caplog.text
    )
    caplog.clear()
    meant(*one_each(*labels), rules=LabelRules(text="names"))
    meant(*one_each(*labels), listed=tuple(labels))
    assert not caplog.text


@pytest.mark.parametrize("text", ["(other)", "a (b)", "cat", "3", "golden retriever", "-1"])
def test_what_is_one_item(text: str) -> None:
    assert split_text(text) == (text,)


@pytest.mark.parametrize("label", ["2.5", "-0.5", ".5", "1e-05"])
def test_fractions(label: str) -> None:
    (reason, _) = meant((label,), ("1",))
    said = (
        f"its label {label} is not a whole number; allowed: whole numbers and names; --labels.text names takes it for a"
    )
    assert reason == f"{said} name"
    assert meant((label,), rules=LabelRules(text="names")) == [(label,)]


def test_names_of_folders_are_names() -> None:
    names = ("None", "-1", "2.5", "[a]", "3.0", "007")
    assert [are_names(None).of((name,))[0] for name in names] == one_each(*names)
    with pytest.raises(ImageRefusedError, match="unknown label 'b'"):
        are_names(("a",)).of(("b",))


def test_what_cannot_change_is_known() -> None:
    assert Meaning(names=None).is_same(["a", "1", "007"])
    assert not Meaning(names=None).is_same(["a", "1.0"])
    assert not Meaning(names=None).is_same(["2.5"])
    assert not Meaning(names=NAMES, numbered=NAMES).is_same(["0"])


@pytest.mark.parametrize("odd", [("0.5", "0.5"), ("2",), ("1", "1", "0")])
def test_one_odd_image_does_not_turn_pairs_of_bits_into_ids(odd: tuple[str, ...]) -> None:
    """Two-class vectors, one of which is something else: all others would have both classes."""
    pairs = [("1", "0"), ("0", "1")] * 20
    with pytest.raises(UserError):
        meant(*pairs, odd)
    found = meant(*pairs, odd, rules=LabelRules(lists="positions"))
    assert found[:2] == [("0",), ("1",)]
    assert "not a vector of 2 values" in str(found[-1])


def test_positions_are_taken_by_their_flag_however_few_the_vectors_are() -> None:
    found = meant(("1", "0", "0"), ("ant",), ("bee",), ("cat",), rules=LabelRules(lists="positions"))
    assert found[0] == ("0",)
    assert all("not a vector of 3 values" in str(reason) for reason in found[1:])
