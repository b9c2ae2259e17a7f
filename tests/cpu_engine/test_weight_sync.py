"""A new version of the weights arrives whole or not at all."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard

from cpu_engine.engine import CPUFSDPEngineWithLMHead
from cpu_engine.rollout import WeightSync
from tests.verl_mixed.sharded_actor import adapted_model, tiny_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 2, bias=False)
        self.body = nn.Linear(2, 2)
        self.head = nn.Linear(3, 2, bias=False)
        self.head.weight = self.embed.weight


def version(model: nn.Module, value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full_like(p, value)) for name, p in model.named_parameters()]


def test_weights_sent_in_parts_are_the_models_after_the_last_part():
    model = Tied()
    sync, parts = WeightSync(model), version(model, 2.0)
    sync.receive(parts[:1], last=False)
    sync.receive(parts[1:], last=True)
    assert all(bool((p == 2.0).all()) for p in model.parameters())


def test_a_missing_parameter_is_refused_and_named():
    model = Tied()
    with pytest.raises(RuntimeError, match=r"incomplete.*body\.bias"):
        WeightSync(model).receive(
            [part for part in version(model, 1.0) if part[0] != "body.bias"], last=True
        )


def test_parts_of_a_refused_version_do_not_count_for_the_next():
    model = Tied()
    sync, parts = WeightSync(model), version(model, 1.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="incomplete"):
            sync.receive(parts[1:], last=True)


def test_a_tied_weight_may_come_under_its_second_name():
    model = Tied()
    weight = torch.full_like(model.head.weight, 9.0)
    WeightSync(model).receive([*version(model, 3.0), ("head.weight", weight)], last=True)
    assert bool((model.head.weight == 3.0).all())


@pytest.mark.parametrize(
    "wrong", [("stranger", torch.zeros(1)), ("body.bias", torch.zeros(5))], ids=["name", "shape"]
)
def test_a_strange_name_or_shape_is_refused(wrong):
    with pytest.raises(RuntimeError, match=wrong[0]):
        WeightSync(Tied()).receive([wrong], last=False)


@pytest.mark.parametrize(
    "value",
    [torch.full((2,), torch.nan), torch.tensor([torch.inf, -torch.inf]), torch.ones(2).long()],
    ids=["nan", "inf", "integers"],
)
def test_values_that_are_no_finite_floats_are_refused(value):
    with pytest.raises(RuntimeError, match=r"body\.bias.*finite"):
        WeightSync(Tied()).receive([("body.bias", value)], last=False)


def test_another_float_type_is_rounded_to_the_models():
    model = Tied().to(torch.bfloat16)
    WeightSync(model).receive([(n, p.float()) for n, p in version(model, 1.01)], last=True)
    assert all(bool((p == torch.tensor(1.01).bfloat16()).all()) for p in model.parameters())


def test_a_rollout_gets_base_and_adapter_merged_in_fp32_and_the_trainer_keeps_both_apart():
    ids = torch.arange(30).reshape(2, 15)
    wanted = adapted_model().eval()(ids).logits
    engine: Any = object.__new__(CPUFSDPEngineWithLMHead)
    engine._is_offload_param = False
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        engine.module = adapted_model()
        for layer in engine.module.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(engine.module)
        before = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
        for _ in range(2):  # a second sync starts from the same weights
            rollout = tiny_model().eval()
            WeightSync(rollout).receive([*engine._merged_lora_per_tensor_param()], last=True)
            torch.testing.assert_close(rollout(ids).logits, wanted, rtol=0, atol=1e-6)
        after = engine.module.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    finally:
        torch.distributed.destroy_process_group()
