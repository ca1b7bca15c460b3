"""Fine-tune a LoRA of Wan on clips that tools.prepare_clips cached; --context ranks share a clip.

accelerate launch --num-processes 8 -m docs.examples.finetune_clip WAN CLIPS OUTPUT --context 4"""

from argparse import ArgumentParser
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import WanTransformer3DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from safetensors.torch import load_file
from torch.utils.data import default_collate

from parallel.diffusers import flow_matching, shard, uniform  # or from the installed package

parser = ArgumentParser(description=__doc__)
for name in ("wan", "clips", "output", "--resume"):  # --resume OUTPUT/step-100
    parser.add_argument(name, type=Path)
for name, default in {"--context": 1, "--clips-per-group": 1, "--steps": 1000}.items():
    parser.add_argument(name, type=int, default=default)
args = parser.parse_args()
accelerator = Accelerator(cpu=not torch.cuda.is_available())
device, ranks = accelerator.device, accelerator.num_processes
group = torch.distributed.new_subgroups(args.context)[0] if args.context > 1 else None
dtype = {"bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)
model = WanTransformer3DModel.from_pretrained(args.wan, torch_dtype=dtype).train()
model.enable_gradient_checkpointing()
torch.manual_seed(0)
model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
cast_training_params(model)  # the LoRA, to float32
cp = shard(model, group, method="ulysses")
wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
state = {"step": 0}
if args.resume:
    lora = {"prefix": None, "adapter_name": "default", "use_safetensors": True}
    model.load_lora_adapter(args.resume, hotswap=True, **lora)
    state = torch.load(args.resume / "state.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
files = sorted(args.clips.glob("clip-*.safetensors"))
for step in range(state["step"] + 1, args.steps + 1):
    # Every rank of a group takes the same samples, and each group takes different ones.
    number = step * (ranks // args.context) + accelerator.process_index // args.context
    samples = range(number * args.clips_per_group, (number + 1) * args.clips_per_group)
    clips = default_collate([load_file(files[sample % len(files)]) for sample in samples])
    latents = clips["latents"].to(device, torch.float32)
    text = clips["text"].to(device, torch.float32)
    time = uniform(samples).to(device)
    time = 3 * time / (1 + 2 * time)  # shifted by 3, as for Wan at 480p
    noisy, target = flow_matching(latents, cp.noise_like(latents, samples), time)
    loss = (wrapped(noisy, 1000 * time, text, return_dict=False)[0] - target).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {accelerator.reduce(loss.detach(), 'mean'):.6f}")
    if accelerator.is_main_process and (step % 100 == 0 or step == args.steps):
        model.save_lora_adapter(args.output / f"step-{step}")
        state = {"step": step, "optimizer": optimizer.state_dict()}
        torch.save(state, args.output / f"step-{step}" / "state.pt")
