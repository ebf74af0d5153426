# Made by python scripts/make_reference.py; do not edit.
from .adapters import apply_adapters as apply_adapters
from .adapters import lora_config as lora_config
from .adapters import trainable_parameters as trainable_parameters
from .build import build_model as build_model
from .config import RunConfig as RunConfig
from .config import plan_batches as plan_batches
from .data.tokenized import TokenizedDataset as TokenizedDataset
from .dist import full_tensor as full_tensor
from .dist import local_rows as local_rows
from .dist import process_group as process_group
from .dist import rank_device as rank_device
from .dist import ranks_from_env as ranks_from_env
from .estimate import resolve as resolve
from .export import save_trained as save_trained
from .export.convert import convert_adapter as convert_adapter
from .export.hub import push_folder as push_folder
from .export.merge import merge_adapter as merge_adapter
from .export.save import load_adapter as load_adapter
from .export.save import save_adapter as save_adapter
from .export.serving import check_adapter_folder as check_adapter_folder
from .integrations.streamed import load_quantized as load_quantized
from .integrations.streamed import shard_and_load as shard_and_load
from .integrations.streamed import streamed_model as streamed_model
from .loading import load_weights as load_weights
from .loading import materialize as materialize
from .loading import meta_model as meta_model
from .loading import read_config as read_config
from .loading.weight_files import Checkpoint as Checkpoint
from .lora_init import init_adapters as init_adapters
from .memory.checkpointing_policy import apply_activation_policy as apply_activation_policy
from .memory.chunked_cross_entropy import apply_chunked_cross_entropy as apply_chunked_cross_entropy
from .observe.evaluate import held_out_loss as held_out_loss
from .optim import build_optimizer as build_optimizer
from .optim import build_scheduler as build_scheduler
from .plan import Plan as Plan
from .quantization.quantize import QuantLinear as QuantLinear
from .quantization.quantize import dequantize_linears as dequantize_linears
from .quantization.quantize import quantize_linears as quantize_linears
from .sharding import STRATEGIES as STRATEGIES
from .sharding import OnHost as OnHost
from .sharding import apply_sharding as apply_sharding
from .sharding import make_mesh as make_mesh
from .sharding import set_gradient_sync as set_gradient_sync
from .training.step import train_step as train_step
from .training.trainer import train as train

__all__: list[str]
__version__: str
PUBLIC: dict[str, str]
