"""Chips and links by their data sheets; every figure has its source."""

from dataclasses import replace

from tplab.cost.chip import Chip
from tplab.cost.link import Link

# What an eagerly launched GPU kernel costs if nothing hides it: a few microseconds, depending on the host.
_GPU_LAUNCH = 5e-6

H100 = Chip(
    "H100 SXM 80GB",
    flops={
        "bfloat16": 989e12,
        "float16": 989e12,
        "float32": 67e12,  # without TF32, as torch multiplies by default
        "float64": 67e12,  # tensor cores
        "float8_e4m3fn": 1979e12,
        "float8_e5m2": 1979e12,
        "int8": 1979e12,
    },
    memory_bandwidth=3.35e12,
    memory=80e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA H100 data sheet; its tensor-core peaks count sparsity: halved here. launch: assumed",
)
H200 = replace(
    H100,
    name="H200 SXM 141GB",
    memory_bandwidth=4.8e12,
    memory=141e9,
    source="NVIDIA H200 data sheet: computes as an H100, 141 GB of HBM3e at 4.8 TB/s; as quoted at "
    "https://aiwiki.ai/wiki/nvidia_h200, read 2026-11-26. launch: assumed",
)
A100 = Chip(
    "A100 SXM 80GB",
    flops={
        "bfloat16": 312e12,
        "float16": 312e12,
        "float32": 19.5e12,  # without TF32
        "float64": 19.5e12,  # tensor cores
        "int8": 624e12,
    },
    memory_bandwidth=2.039e12,
    memory=80e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA A100 80GB data sheet. launch: assumed",
)
A100_40GB = replace(
    A100,
    name="A100 SXM 40GB",
    memory_bandwidth=1.555e12,
    memory=40e9,
    source="NVIDIA A100 data sheet, 40 GB. launch: assumed",
)
B200 = Chip(
    "B200 SXM 180GB",
    flops={
        "bfloat16": 2250e12,
        "float16": 2250e12,
        "float32": 75e12,  # without TF32
        "float64": 37e12,
        "float8_e4m3fn": 4500e12,
        "float8_e5m2": 4500e12,
        "int8": 4500e12,
    },
    memory_bandwidth=7.7e12,
    memory=180e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA Blackwell data sheet, HGX B200: 4.5 PFLOPS in BF16 and 9 in FP8 and INT8, with sparsity, halved "
    "here; FP32 75, FP64 37 TFLOPS; 180 GB, 7.7 TB/s; as quoted at https://zdszero.github.io/Computer/Artificial_Intelligence/"
    "Hardware.html, read 2026-11-26. launch: assumed",
)
GB200 = Chip(
    "GB200 186GB",
    flops={
        "bfloat16": 2500e12,
        "float16": 2500e12,
        "float32": 80e12,  # without TF32
        "float64": 40e12,
        "float8_e4m3fn": 5000e12,
        "float8_e5m2": 5000e12,
        "int8": 5000e12,
    },
    memory_bandwidth=8e12,
    memory=186e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA Blackwell data sheet, one GPU of GB200 NVL72: 5 PFLOPS in BF16 and 10 in FP8 and INT8, with "
    "sparsity, halved here; FP32 80, FP64 40 TFLOPS; 186 GB, 8 TB/s; as quoted at https://zdszero.github.io/Computer/"
    "Artificial_Intelligence/Hardware.html, read 2026-11-26. launch: assumed",
)
_ULTRA = (
    "as quoted without sparsity at https://verda.com/blog/gb300-nvl72-architecture, read 2026-11-26; FP64 1.25 TFLOPS: "
    "https://glennklockwood.com/garden/processors/B300, read 2026-11-26. launch: assumed"
)
B300 = Chip(
    "B300 SXM 270GB",
    flops={
        "bfloat16": 2250e12,
        "float16": 2250e12,
        "float32": 75e12,  # without TF32
        "float64": 1.25e12,
        "float8_e4m3fn": 4500e12,
        "float8_e5m2": 4500e12,
        "int8": 150e12,
    },
    memory_bandwidth=7.7e12,
    memory=270e9,
    launch=_GPU_LAUNCH,
    source=f"NVIDIA HGX B300: BF16 2.25, FP8 4.5 PFLOPS, INT8 0.15 POPS, FP32 75 TFLOPS; 270 GB, 7.7 TB/s; {_ULTRA}",
)
GB300 = Chip(
    "GB300 279GB",
    flops={
        "bfloat16": 2500e12,
        "float16": 2500e12,
        "float32": 80e12,  # without TF32
        "float64": 1.25e12,
        "float8_e4m3fn": 5000e12,
        "float8_e5m2": 5000e12,
        "int8": 165e12,
    },
    memory_bandwidth=8e12,
    memory=279e9,
    launch=_GPU_LAUNCH,
    source="NVIDIA GB300 NVL72, one GPU: BF16 2.5, FP8 5 PFLOPS, INT8 0.165 POPS, FP32 80 TFLOPS; 279 GB, 8 TB/s; "
    f"{_ULTRA}",
)
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
