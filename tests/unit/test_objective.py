"""The objective that accelerate wraps, features, acceptance counts, and the optimizer's parts."""

from collections.abc import Sequence

import pytest
import torch

from drafters.base import Features, NeuralDrafter
from drafters.errors import UserError
from drafters.losses import LossSettings, LossSums
from drafters.registry import build_drafter
from drafters.target import Target
from inference import generate
from tests.tiny import prompts_of as random_prompts
from tests.tiny import tiny_target
from training import acceptance
from training.batches import compose
from training.examples import Example
from training.features import Lessons, check_batch_fits, decide, stored_bytes
from training.lesson_settings import FeatureSettings
from training.metrics import Window, held_out_metrics, metrics_of
from training.objective import Objective
from training.optim import make_optimizer, rate_at, set_rate
from training.options import EvaluateSettings, OptimSettings, ScheduleSettings, seconds


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(num_hidden_layers=7, initializer_range=0.2)


def examples_of(*lengths: int, answer: int | None = None, seed: int = 0) -> list[Example]:
    """Make chats of random tokens; the last `answer` (default two thirds) are supervised."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, n in enumerate(lengths):
        ids = torch.randint(3, 128, (n,), generator=generator)
        start = n // 3 if answer is None else n - answer
        made.append(Example(f"chat-{i}", ids, torch.arange(n) >= start))
    return made


def drafter_of(target: Target, name: str = "medusa", **options: object) -> NeuralDrafter:
    torch.manual_seed(0)
    drafter = build_drafter(name, {"draft_vocab_size": 32, **options}, target.shape)
    assert isinstance(drafter, NeuralDrafter)
    drafter.init_from(target)
    return drafter


def lessons_of(
    examples: Sequence[Example],
    target: Target,
    features: Features,
    keep: str = "none",
    dtype: str = "float32",
    groups: Sequence[Sequence[int]] | None = None,
) -> Lessons:
    if groups is None:
        groups = compose([len(e) for e in examples], 64, seed=0)
    return Lessons(
        examples,
        groups,
        target=target,
        features=features,
        settings=FeatureSettings(keep, dtype),
        loss=LossSettings(),
    )


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_a34_every_prediction_has_the_same_say_wherever_it_lands(target: Target, name: str) -> None:
    # case A34: two batches with 8 and 2 supervised tokens against both in one
    drafter = drafter_of(target, name)
    examples = examples_of(16, answer=8) + examples_of(13, answer=2, seed=1)
    objective = Objective(drafter, target, LossSettings())

    def gradients(groups: list[list[int]]) -> list[torch.Tensor]:
        drafter.zero_grad()
        lessons = lessons_of(examples, target, drafter.features, groups=groups)
        sums = [objective(lessons[i]) for i in range(len(groups))]
        weight = sum(s.weight.sum() for s in sums)
        for s in sums:
            (s.loss.sum() / weight).backward()
        return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]

    together, apart = gradients([[0, 1]]), gradients([[0], [1]])
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-4)


def test_a34_the_worked_example_of_token_weights() -> None:
    # case A34: losses 1 (eight tokens) and 3 (two tokens) are 1.4 a token, not 2
    one = torch.ones(1)
    parts = LossSums(8 * one + 6 * one, 10 * one, one, one, one)
    assert metrics_of(parts)["loss"] == pytest.approx(1.4)


@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_the_loss_falls_and_never_touches_the_target(target: Target, name: str) -> None:
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    drafter = drafter_of(target, name)
    objective = Objective(drafter, target, LossSettings())
    lessons = lessons_of(examples_of(20, 14, 17), target, drafter.features, keep="memory")
    optimizer = make_optimizer(drafter, OptimSettings(lr=3e-3))
    losses = []
    for _ in range(12):
        sums = objective(lessons[0])
        loss = sums.loss.sum() / sums.weight.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert not any(name.startswith("target") for name, _ in objective.named_parameters())
    for key, value in target.model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in target.model.parameters())


def test_a_lesson_with_share_0_gives_every_parameter_a_zero_gradient(target: Target) -> None:
    drafter = drafter_of(target)
    lessons = lessons_of(examples_of(16), target, drafter.features)
    sums = Objective(drafter, target, LossSettings())(lessons[0], 0.0)
    sums.loss.sum().backward()
    assert torch.stack([x.detach() for x in sums]).abs().sum() == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_a_lesson_without_a_supervised_token_is_finite(target: Target) -> None:
    # case A27
    drafter = drafter_of(target)
    silent = Example("a", torch.arange(9), torch.zeros(9, dtype=torch.bool))
    sums = Objective(drafter, target, LossSettings())(
        lessons_of([silent], target, drafter.features)[0]
    )
    sums.loss.sum().backward()
    assert torch.stack(list(sums)).abs().sum() == 0
    assert metrics_of(LossSums(*(x.detach() for x in sums)))["loss"] == 0


def test_kept_features_are_the_same_tensors_rounded_once(target: Target) -> None:
    features = Features(layers=(1, 3))
    examples = examples_of(20, 14, 17, 30)
    kept = lessons_of(examples, target, features, keep="memory", dtype="bfloat16")
    fresh = lessons_of(examples, target, features, dtype="bfloat16")
    exact = lessons_of(examples, target, features)
    for index in range(len(kept)):
        for first, second in ((kept[index], kept[index]), (kept[index], fresh[index])):
            torch.testing.assert_close(first.batch.taps, second.batch.taps, atol=0, rtol=0)
            torch.testing.assert_close(tuple(first.summary), tuple(second.summary))
        wanted = exact[index].batch.last.bfloat16().float()
        assert torch.equal(kept[index].batch.last, wanted)
        assert kept[index].batch.last.dtype == torch.float32


def test_a_row_is_the_same_alone_and_in_company(target: Target) -> None:
    # case A17
    examples = examples_of(5, 12)
    features = Features(layers=(1, 3))
    both = lessons_of(examples, target, features, groups=[[0, 1]])[0].batch
    alone = lessons_of(examples, target, features, groups=[[0]])[0].batch
    assert both.taps is not None
    assert alone.taps is not None
    torch.testing.assert_close(both.taps[:1, :5], alone.taps, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(both.last[:1, :5], alone.last, atol=1e-4, rtol=1e-5)


def test_features_are_kept_where_they_fit() -> None:
    auto, memory = FeatureSettings(), FeatureSettings("memory")
    assert decide(auto, 100, free=400).keep == "memory"
    assert decide(auto, 101, free=400).keep == "none"
    assert decide(memory, 400, free=400).keep == "memory"
    with pytest.raises(UserError, match=r"needs 2\.00 GiB and 1\.00 GiB are free"):
        decide(memory, 2 * 2**30, free=2**30)
    # two batches padded to 5 and 3 tokens: 2 * 5 + 3 tokens of 7 values
    size = stored_bytes([4, 5, 3], [[0, 1], [2]], 7, FeatureSettings(dtype="bfloat16"))
    assert size == 13 * 7 * 2


def test_a_batch_that_does_not_fit_says_what_it_needs(target: Target) -> None:
    check_batch_fits([64], [[0]], target, LossSettings())
    with pytest.raises(UserError, match=r"about .* GiB of memory.*data\.batch_tokens"):
        check_batch_fits([64], [[0]], target, LossSettings(), free=1000)


def test_acceptance_counts_what_the_engine_emits(target: Target) -> None:
    drafter = drafter_of(target, heads=2).eval()
    settings = EvaluateSettings(new_tokens=9, shape="growth=chain,gamma=2", temperatures=[0.0, 0.7])
    prompts = random_prompts(4, 7, 5)
    found = acceptance.measure(target, drafter, prompts, settings, seed=0)
    counts: list[int] = []
    for temperature in settings.temperatures:
        outputs = generate(
            target,
            drafter,
            prompts,
            growth=acceptance.growth_of(settings.shape),
            verify=acceptance.spec_of(settings.shape).verify,
            max_new_tokens=9,
            temperature=temperature,
            seed=0,
        )
        counts.append(sum(output.rounds for output in outputs))
        name = f"tau/{temperature:g}"
        assert found[name] == pytest.approx(24 / counts[-1])
        assert found[f"{name}/low"] <= found[name] <= found[f"{name}/high"]
    assert found["tau"] == pytest.approx(48 / sum(counts))
    assert 0 < found["survival/1"] <= found["alpha/1"]  # a last round has no room to draft
    assert "alpha/3" not in found


def test_a_growth_is_named_and_known() -> None:
    assert acceptance.growth_of("growth=static,branching=2.1").nodes == 4
    assert acceptance.growth_of("gamma=3").nodes == 3
    with pytest.raises(UserError, match="unknown part: gama"):
        acceptance.growth_of("growth=chain,gama=3")
    assert acceptance.spec_of("draft=sampled").verify == "block"
    assert acceptance.spec_of("draft=sampled,verify=lossless").verify == "lossless"
    with pytest.raises(UserError, match=r"is judged by typical \(LOSSY\): leave verify out"):
        acceptance.spec_of("verify=typical")


def test_prompts_leave_room_for_the_answer() -> None:
    examples = examples_of(20, 9, 30, 12)
    settings = EvaluateSettings(prompts=2, new_tokens=8)
    prompts = acceptance.prompts_of(examples, settings, room=15)
    assert prompts == [examples[i].ids[:n].tolist() for i, n in ((0, 6), (1, 3))]


def test_held_out_metrics_are_shares_of_all_predictions(target: Target) -> None:
    drafter = drafter_of(target, heads=2)
    objective = Objective(drafter, target, LossSettings())
    examples = examples_of(20, 14, 17, 30, 25)
    one = held_out_metrics(objective, lessons_of(examples, target, drafter.features))
    whole = lessons_of(examples, target, drafter.features, groups=[[0, 1, 2, 3, 4]])
    assert one == pytest.approx(held_out_metrics(objective, whole), rel=1e-4)
    assert set(one) == {"loss", "agreement/1", "agreement/2", "overlap/1", "overlap/2"}
    assert all(0 <= v <= 1 for k, v in one.items() if k != "loss")


def test_the_window_forgets_what_it_has_told() -> None:
    window = Window()
    sums = torch.tensor([[4.0], [2.0], [1.0], [1.0], [2.0]])
    window.add(sums, 10, 2.0, 0.1)
    window.add(None, 20, 1.0, 0.2)
    told = window.read()
    assert told["train/loss"] == 2
    assert told["tokens_per_second"] == 10
    assert told["learning_rate"] == 0.2
    assert "train/loss" not in window.read()


def test_vectors_are_not_decayed_and_rates_are_scaled(target: Target) -> None:
    drafter = drafter_of(target)
    settings = OptimSettings(lr=0.1, lr_scale={"outputs": 0.5}, weight_decay=0.01)
    optimizer = make_optimizer(drafter, settings)
    assert set_rate(optimizer, 0.5) == pytest.approx(0.05)
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in drafter.named_parameters():
        group = groups[id(parameter)]
        assert group["weight_decay"] == (0.01 if parameter.ndim > 1 else 0)
        assert group["lr"] == pytest.approx(0.025 if name.startswith("outputs") else 0.05)
    with pytest.raises(UserError, match=r"\['head\.'\].*heads, outputs"):
        make_optimizer(drafter, OptimSettings(lr_scale={"head.": 0.5}))


def test_a_scale_of_0_freezes(target: Target) -> None:
    drafter = drafter_of(target)
    optimizer = make_optimizer(drafter, OptimSettings(lr_scale={"outputs": 0.0}))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in drafter.named_parameters():
        assert parameter.requires_grad is not name.startswith("outputs")
        assert (id(parameter) in held) is parameter.requires_grad
    lessons = lessons_of(examples_of(16), target, drafter.features)
    sums = Objective(drafter, target, LossSettings())(lessons[0])
    sums.loss.sum().backward()
    assert all((p.grad is None) is not p.requires_grad for p in drafter.parameters())


def test_the_rate_rises_falls_and_ends_at_its_floor() -> None:
    linear = ScheduleSettings(kind="linear", warmup=0.2, floor=0.1)
    assert [rate_at(x, linear) for x in (0, 0.1, 0.2, 0.6, 1)] == pytest.approx(
        [0, 0.5, 1, 0.55, 0.1]
    )
    assert rate_at(0.7, ScheduleSettings(kind="constant")) == 1
    assert rate_at(0, ScheduleSettings(warmup=0.0)) == 1


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("12m", 720), ("1.5h", 5400)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["12", "m", "-3m", "0s", "1d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"schedule\.time_budget"):
        ScheduleSettings(time_budget=text)
