"""PEFT's own LoRA tests, run against the layers of this project: which pass, and why others can't.

    git clone --branch v0.21.2 https://github.com/huggingface/peft
    python benchmarks/peft_tests.py peft                     # all test files that touch LoRA
    python benchmarks/peft_tests.py peft tests/test_custom_models.py -k merge
    python benchmarks/peft_tests.py peft tests/test_decoder_models.py --every 5   # each fifth case

`LoraLinear` takes the place of PEFT's layer wherever a test adapts an nn.Linear; tests that adapt none
don't count, and those of another tuner's configuration are not run. Models of the hub are small random
ones here (tiny_hub.py). Tests that fail run again with PEFT's layers, and don't count if they fail there
too: they need a real download, or a GPU. A failure that is left is one of `_CANNOT_APPLY`, with its
reason, or makes the script fail. Beside this project's, the tests need parameterized, diffusers and scipy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tiny_hub import write_cache

ROOT = Path(__file__).parents[1]
# By a part of a test's name: why it can't apply to layers of this project.
_CANNOT_APPLY = {
    r"TestLayerRepr::test_repr_lora_(linear|paramwrapper)": "asks for the name of PEFT's own class",
    r"test_modules_to_save_targets_lora_layer_raises": "asks for the name of PEFT's own class",
    r"test_module_type_(small|large)|test_target_parameters_and_target_modules$": "asks for the name "
    "of PEFT's own class",
    r"DisableInputDtypeCasting::test_(no_disable|\w*_inactive)": "asks for torch's error where a hook "
    "changes the dtype of weights; products here are in the input's dtype",
    r"test_dora_caching_linear": "asks for PEFT's cache of norms, which are computed in the product here",
    r"TestDynamicDispatch": "replaces the layer that this script puts in place",
    r"test_lora_use_dora_linear$": "asks for outputs to 1e-8 near 0; a product and a bias that are added "
    "apart round by 2e-7",
}
_FILES = [
    "tests/test_custom_models.py",
    "tests/test_initialization.py",
    "tests/test_lora_variants.py",
    "tests/test_lora_conversion.py",
    "tests/test_lora_ga.py",
    "tests/test_lora_intruders.py",
    "tests/test_low_level_api.py",
    "tests/test_tuners_utils.py",
    "tests/test_bdlora.py",
    "tests/test_velora.py",
    "tests/test_lorafa.py",
    "tests/test_loraplus.py",
    "tests/test_riemannian_lora.py",
    "tests/test_mixed.py",
    "tests/test_arrow.py",
    "tests/test_other.py",
    "tests/test_decoder_models.py",
    "tests/test_encoder_decoder_models.py",
    "tests/test_feature_extraction_models.py",
    "tests/test_seq_classifier.py",
    "tests/test_target_parameters.py",
    "tests/test_trainable_tokens.py",
    "tests/test_token_classification_qa.py",
    "tests/test_vision_models.py",
    "tests/test_xlora.py",
    "tests/test_helpers.py",
    "tests/test_integrations.py",
    "tests/test_mapping.py",
    "tests/test_auto.py",
    "tests/test_hub_features.py",
    "tests/test_poly.py",
    "tests/test_stablediffusion.py",
]


class _Watch:
    """A pytest plugin: which tests adapt an nn.Linear with LoRA, and how each ended."""

    def pytest_addoption(self, parser):
        parser.addoption("--every", type=int, default=1, help="run each n-th case only")

    def __init__(self, results: str, ours: bool):
        self.results, self.ours = results, ours
        self.adapted, self.ends = 0, {}

    def pytest_configure(self):
        from peft.tuners.lora import LoraModel
        from torch import nn

        from fsdp_qlora.adapters import LoraLinear

        made = LoraModel._create_new_module

        def create(lora_config, adapter_name, target, **kwargs):
            is_linear = type(getattr(target, "base_layer", target)) is nn.Linear
            if is_linear and not kwargs.get("parameter_name"):  # of target_parameters
                self.adapted += 1
                if self.ours and not lora_config._custom_modules:
                    return LoraLinear(target, adapter_name, config=lora_config, **kwargs)
            return made(lora_config, adapter_name, target, **kwargs)

        LoraModel._create_new_module = staticmethod(create)

    def pytest_collection_modifyitems(self, config, items):
        if helpers := sys.modules.get("tests.testing_utils"):
            helpers._HUB_MODEL_ACCESSES = _AskedFor()
        items[:] = [item for item in items if not _of_another_tuner(item)]
        items[:] = items[:: config.getoption("every")]

    def pytest_runtest_setup(self):
        self.adapted = 0

    def pytest_runtest_logreport(self, report):
        end = self.ends.setdefault(report.nodeid, {"passed": True, "adapted": False, "why": ""})
        end["adapted"] |= bool(self.adapted)
        if report.failed:
            end["passed"], end["why"] = False, report.longreprtext[-600:]
        elif report.skipped:
            end["passed"], end["why"] = False, "skipped"

    def pytest_sessionfinish(self):
        Path(self.results).write_text(json.dumps(self.ends))


class _AskedFor(Counter):
    """Models that tests asked the hub for: all, since only the first time do they go online for one."""

    def __contains__(self, name):
        return True


def _of_another_tuner(item) -> bool:
    """Whether a test's parameters are configurations of which none is LoRA's, so that it can't count."""
    from peft import LoraConfig, PeftConfig

    given = getattr(item, "callspec", None)
    kinds = [v for v in given.params.values() if isinstance(v, type)] if given else []
    kinds = [kind for kind in kinds if issubclass(kind, PeftConfig)]
    return bool(kinds) and not any(issubclass(kind, LoraConfig) for kind in kinds)


_HUB = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # and HF_HUB_CACHE, once it is written


def _run(checkout: str, layers: str, given: list[str], only: list[str] | None = None) -> dict:
    """By test: passed, adapted (it made a LoRA layer over an nn.Linear), and the end of its report."""
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results.json"
        if only is not None:
            Path(f"{folder}/only").write_text("\n".join(only))
            given = [f"@{folder}/only"]
        command = [sys.executable, __file__, "--one", layers, results, *given]
        subprocess.run(command, cwd=checkout, check=False, env=os.environ | _HUB)
        return json.loads(Path(results).read_text())


def _run_here(layers: str, results: str, given: list[str]):
    """One run of pytest, in the checkout."""
    import pytest

    options = ["-c", "/dev/null", "--rootdir", ".", "-q", "-p", "no:cacheprovider", "--tb=short"]
    sys.path.append(str(ROOT))
    pytest.main(
        [*options, "--no-header", "--continue-on-collection-errors", *given],
        plugins=[_Watch(results, layers == "ours")],
    )


def main(checkout: str, *given: str):
    names = list(given) or [f for f in _FILES if (Path(checkout) / f).exists()]
    with tempfile.TemporaryDirectory() as cache:
        write_cache(Path(cache))
        _HUB["HF_HUB_CACHE"] = cache
        _compare(checkout, names)


def _compare(checkout: str, names: list[str]):
    """Print what passes with these layers, of what passes with PEFT's; exit with 1 for a new failure."""
    ours = _run(checkout, "ours", names)
    adapted = {name: end for name, end in ours.items() if end["adapted"]}
    failed = [name for name, end in adapted.items() if not end["passed"]]
    theirs = _run(checkout, "peft", [], only=failed) if failed else {}
    failed = [name for name in failed if theirs[name]["passed"]]
    counted = [name for name, end in adapted.items() if end["passed"] or name in failed]
    for file, count in Counter(name.split("::")[0] for name in counted).items():
        lost = sum(name.startswith(f"{file}::") for name in failed)
        print(f"{file}: {count - lost} of {count} pass")
    for name in failed:
        print(f"{name}: {_reason(name) or 'FAILED ' + ours[name]['why']}")
    unexplained = [name for name in failed if not _reason(name)]
    others = sum(end["why"] not in ("", "skipped") for end in ours.values() if not end["adapted"])
    print(
        f"{len(counted) - len(failed)} of {len(counted)} pass; {len(unexplained)} fail without a "
        f"reason; {len(adapted) - len(counted)} fail with PEFT's own layers here too, or are skipped; "
        f"{others} fail before they adapt a linear layer"
    )
    sys.exit(bool(unexplained))


def _reason(name: str) -> str | None:
    return next((why for part, why in _CANNOT_APPLY.items() if re.search(part, name)), None)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        _run_here(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main(*sys.argv[1:])
