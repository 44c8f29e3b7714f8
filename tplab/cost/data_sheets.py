"""Chips and links by their data sheets; every figure has its source."""

from dataclasses import replace

from tplab.cost.chip import Chip
from tplab.cost.link import Link

# What an eagerly launched GPU kernel costs if nothing hides it: a few microseconds, depending on the host.
_GPU_LAUNCH = 5e-6


def _gpu(
    name: str, *, bits16: float, float32: float, float64: float, int8: float, float8: float | None = None,
    memory_bandwidth: float, memory: float, source: str,
) -> Chip:  # fmt: skip
    """A GPU, from its FLOP/s: of bfloat16 and float16, of float32 without TF32, as torch multiplies by default, of
    float64 on tensor cores where it has them, of int8, and of both 8-bit floats if it has them."""
    flops = {"bfloat16": bits16, "float16": bits16, "float32": float32, "float64": float64}
    if float8 is not None:
        flops |= {"float8_e4m3fn": float8, "float8_e5m2": float8}
    flops["int8"] = int8
    return Chip(name, flops, memory_bandwidth, memory, launch=_GPU_LAUNCH, source=f"{source}. launch: assumed")


H100 = _gpu(
    "H100 SXM 80GB",
    bits16=989e12, float32=67e12, float64=67e12, float8=1979e12, int8=1979e12,
    memory_bandwidth=3.35e12, memory=80e9,
    source="NVIDIA H100 data sheet; its tensor-core peaks count sparsity: halved here",
)  # fmt: skip
H200 = replace(
    H100,
    name="H200 SXM 141GB",
    memory_bandwidth=4.8e12,
    memory=141e9,
    source="NVIDIA H200 data sheet: computes as an H100, 141 GB of HBM3e at 4.8 TB/s; as quoted at "
    "https://aiwiki.ai/wiki/nvidia_h200, read 2026-11-26. launch: assumed",
)
A100 = _gpu(
    "A100 SXM 80GB",
    bits16=312e12, float32=19.5e12, float64=19.5e12, int8=624e12,
    memory_bandwidth=2.039e12, memory=80e9,
    source="NVIDIA A100 80GB data sheet",
)  # fmt: skip
A100_40GB = replace(
    A100,
    name="A100 SXM 40GB",
    memory_bandwidth=1.555e12,
    memory=40e9,
    source="NVIDIA A100 data sheet, 40 GB. launch: assumed",
)
B200 = _gpu(
    "B200 SXM 180GB",
    bits16=2250e12, float32=75e12, float64=37e12, float8=4500e12, int8=4500e12,
    memory_bandwidth=7.7e12, memory=180e9,
    source="NVIDIA Blackwell data sheet, HGX B200: 4.5 PFLOPS in BF16 and 9 in FP8 and INT8, with sparsity, halved "
    "here; FP32 75, FP64 37 TFLOPS; 180 GB, 7.7 TB/s; as quoted at https://zdszero.github.io/Computer/Artificial_Intelligence/"
    "Hardware.html, read 2026-11-26",
)  # fmt: skip
GB200 = _gpu(
    "GB200 186GB",
    bits16=2500e12, float32=80e12, float64=40e12, float8=5000e12, int8=5000e12,
    memory_bandwidth=8e12, memory=186e9,
    source="NVIDIA Blackwell data sheet, one GPU of GB200 NVL72: 5 PFLOPS in BF16 and 10 in FP8 and INT8, with "
    "sparsity, halved here; FP32 80, FP64 40 TFLOPS; 186 GB, 8 TB/s; as quoted at https://zdszero.github.io/Computer/"
    "Artificial_Intelligence/Hardware.html, read 2026-11-26",
)  # fmt: skip
_ULTRA = (
    "as quoted without sparsity at https://verda.com/blog/gb300-nvl72-architecture, read 2026-11-26; FP64 1.25 TFLOPS: "
    "https://glennklockwood.com/garden/processors/B300, read 2026-11-26"
)
B300 = _gpu(
    "B300 SXM 270GB",
    bits16=2250e12, float32=75e12, float64=1.25e12, float8=4500e12, int8=150e12,
    memory_bandwidth=7.7e12, memory=270e9,
    source=f"NVIDIA HGX B300: BF16 2.25, FP8 4.5 PFLOPS, INT8 0.15 POPS, FP32 75 TFLOPS; 270 GB, 7.7 TB/s; {_ULTRA}",
)  # fmt: skip
GB300 = _gpu(
    "GB300 279GB",
    bits16=2500e12, float32=80e12, float64=1.25e12, float8=5000e12, int8=165e12,
    memory_bandwidth=8e12, memory=279e9,
    source="NVIDIA GB300 NVL72, one GPU: BF16 2.5, FP8 5 PFLOPS, INT8 0.165 POPS, FP32 80 TFLOPS; 279 GB, 8 TB/s; "
    f"{_ULTRA}",
)  # fmt: skip
TPU_V5E = Chip(
    "TPU v5e",
    flops={
        "bfloat16": 197e12,
        "float32": 197e12,  # XLA multiplies float32 in one bfloat16 pass unless asked for more precision
        "int8": 393e12,
    },
    memory_bandwidth=819e9,
    memory=16e9,
    launch=1e-6,
    source="cloud.google.com/tpu/docs/v5e. launch: assumed; operations are compiled into one program",
)
LAPTOP = Chip(
    "laptop, 2 cores",
    flops={"float32": 192e9, "float64": 96e9},
    memory_bandwidth=40e9,
    memory=8e9,
    launch=5e-6,
    source="assumed: 2 cores x 3 GHz x 2 FMA units (2 FLOPs) x 8 float32 (AVX2); two channels of DDR4; eager dispatch",
)
LAPTOP_CORE = Chip(
    "laptop, one of its cores",
    flops={"float32": 96e9, "float64": 48e9},
    memory_bandwidth=20e9,
    memory=4e9,
    launch=5e-6,
    source="assumed: half of a 2-core laptop",
)

# NCCL has three protocols. This is the latency of LL128, which still reaches 95% of the peak bandwidth over NVLink
# (Hu et al. 2025, "Demystifying NCCL"); Simple would be 3.4 and 9.6 us, LL 0.6 and 2.7 us at half the bandwidth.
_NCCL = "latency: NCCL, src/graph/tuning.cc, ring with LL128"

NVLINK_4 = Link("NVLink 4", 1.9e-6, 450e9, f"NVIDIA H100 data sheet: 900 GB/s, both directions together. {_NCCL}")
NVLINK_5 = Link("NVLink 5", 1.9e-6, 900e9, f"NVIDIA B200 data sheet: 1.8 TB/s, both directions together. {_NCCL}")
NVLINK_3 = Link("NVLink 3", 1.9e-6, 300e9, f"NVIDIA A100 data sheet: 600 GB/s, both directions together. {_NCCL}")
INFINIBAND_NDR = Link("InfiniBand NDR", 4.0e-6, 50e9, f"400 Gb/s, one ConnectX-7 per GPU in DGX H100. {_NCCL}, network")
INFINIBAND_XDR = Link(
    "InfiniBand XDR", 4.0e-6, 100e9, f"800 Gb/s, one ConnectX-8 per GPU in DGX B300. {_NCCL}, network"
)
INFINIBAND_HDR = Link("InfiniBand HDR", 4.0e-6, 25e9, f"200 Gb/s, one ConnectX-6 per GPU in DGX A100. {_NCCL}, network")
ICI_V5E = Link(
    "ICI",
    1e-6,
    50e9,
    "cloud.google.com/tpu/docs/v5e: 1,600 Gb/s per chip over 4 ports, so 400 Gb/s per port and direction. "
    "latency: Austin et al. 2025, How to Scale Your Model, part 3",
)
LOOPBACK = Link("TCP over loopback", 25e-6, 5e9, "assumed; two processes on 2 cores measured 26 us and 5.1 GB/s")
ETHERNET_1G = Link("1 Gb Ethernet", 50e-6, 125e6, "IEEE 802.3ab: 1 Gb/s. latency: assumed, TCP through one switch")
ETHERNET_10G = Link("10 Gb Ethernet", 20e-6, 1.25e9, "IEEE 802.3an: 10 Gb/s. latency: assumed, TCP through one switch")
ETHERNET_100G = Link(
    "100 Gb Ethernet", 20e-6, 12.5e9, "IEEE 802.3ba: 100 Gb/s. latency: assumed, TCP through one switch"
)
EFA_P5 = Link(
    "EFA", 20e-6, 50e9, "aws.amazon.com/ec2/instance-types/p5: 3,200 Gb/s for the 8 GPUs of a node. latency: assumed"
)
