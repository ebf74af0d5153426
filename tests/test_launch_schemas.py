"""The launch examples have the form that the schedulers read, by these schedulers' own packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "examples/launch"


def only_told(told, read, path: str = "") -> list[str]:
    """Places of a document that its model has not kept, as it does not know them."""
    if isinstance(told, list):
        pairs = zip(told, read, strict=True)
        return [place for a, b in pairs for place in only_told(a, b, f"{path}[]")]
    if not isinstance(told, dict):
        return []
    unknown = [f"{path}.{key}" for key in told if key not in read]
    known = told.keys() & read.keys()
    return unknown + [p for key in known for p in only_told(told[key], read[key], f"{path}.{key}")]


@pytest.mark.schedulers
def test_kubeflow_trainer_knows_every_field_of_the_kubernetes_file():
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob

    documents = [*yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())]
    models = TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
    for told, model in zip(documents, models, strict=True):
        assert only_told(told, model.from_dict(told).to_dict()) == []
    mistaken = documents[0] | dict(spec=dict(mlPolicy=dict(torch=dict(numProcPerNode=8))))
    assert only_told(mistaken, models[0].from_dict(mistaken).to_dict()) == [
        ".spec.mlPolicy.torch.numProcPerNode"
    ]


@pytest.mark.schedulers
def test_skypilot_and_dstack_read_their_files_as_tasks_of_two_machines():
    from dstack._internal.core.models.configurations import parse_apply_configuration
    from sky import Task

    assert Task.from_yaml(str(LAUNCH / "skypilot.yaml")).num_nodes == 2
    told = yaml.safe_load((LAUNCH / "dstack.yaml").read_text())
    task = parse_apply_configuration(told)
    assert task.nodes == 2 and task.resources.gpu.count.min == 8
    with pytest.raises(Exception, match="nodez"):
        parse_apply_configuration(told | dict(nodez=2))
