"""A quick sample of the zoo across libraries and families: equal to eager at the planner's cut and a random one."""

from __future__ import annotations

import pytest

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

import zoo_check
import zoo_models

#: Small ones; each shows another kind of model.
SAMPLE = (
    "torchvision:squeezenet1_1",
    "torchvision:shufflenet_v2_x0_5",
    "torchvision:segmentation/lraspp_mobilenet_v3_large",
    "timm:lcnetv2_small",
    "timm:starnet_s050",
    "timm:repghostnet_050",
    "timm:mobilevit_xxs",
    "transformers:gpt2",
    "transformers:llama",
    "transformers:gemma2",
    "transformers:bloom",
    "transformers:mamba",
    "transformers:mixtral",
    "transformers:bert",
    "transformers:albert",
    "transformers:deberta-v2",
    "transformers:modernbert",
    "transformers:t5",
    "transformers:bart",
    "transformers:vit",
    "transformers:swin",
    "transformers:convnext",
    "transformers:wav2vec2",
    "transformers:whisper",
    "transformers:clip",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_equal_to_eager(name: str) -> None:
    found = zoo_check.check(name, random_cuts=1, evaluation=False)
    assert found.outcome == "pass", f"{found.code} {found.reason}"
    assert found.difference is not None
    assert found.difference <= (found.allowed or 0.0)
    assert max(found.stages) > 1, "nothing was cut"


def test_names_are_unique_and_plenty() -> None:
    names = zoo_models.names()
    assert len(names) == len(set(names))
    count = {library: sum(n.startswith(library + ":") for n in names) for library in zoo_models.LIBRARIES}
    assert count["timm"] == 100
    assert count["transformers"] >= 60
