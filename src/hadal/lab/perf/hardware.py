"""Peak rates of GPUs and their links, by name and with sources. Contains no efficiencies."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
TB = 1e12
TFLOPS = 1e12


@dataclass(frozen=True, slots=True)
class Hardware:
    """Kind of GPU in its node. FLOP/s are dense; rates of links are per GPU and direction."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    fp4_flops: float
    """Peak FP4 FLOP/s; 0.0 without FP4 tensor cores."""
    num_sms: int
    nvlink_bytes_per_s: float
    nvlink_domain: int
    """Number of GPUs that reach each other over NVLink."""
    nic_bytes_per_s: float
    gpus_per_node: int
    source: str
    is_power_limited: bool = True
    """True if power limits tensor cores, so that the clock falls under sustained computation."""

    def __post_init__(self) -> None:
        for field in (
            "hbm_bytes",
            "hbm_bytes_per_s",
            "bf16_flops",
            "fp8_flops",
            "num_sms",
            "nvlink_bytes_per_s",
            "nvlink_domain",
            "nic_bytes_per_s",
            "gpus_per_node",
        ):
            if getattr(self, field) <= 0:
                raise ValueError(
                    f"hardware {self.name}: {field} is {getattr(self, field)}; it must be positive."
                )


H800 = Hardware(
    "h800",
    80 * GB,
    3.35 * TB,
    989 * TFLOPS,
    1979 * TFLOPS,
    0.0,
    132,
    200 * GB,
    8,
    50 * GB,
    8,
    "HBM and FLOP/s: NVIDIA's H100 SXM data sheet, the same chip; NVLink 200 GB/s and one 400 Gb/s"
    " CX7 per GPU: DeepEP README and arXiv 2505.09343",
)
HARDWARE: dict[str, Hardware] = {
    row.name: row
    for row in (
        H800,
        Hardware(
            "h20",
            96 * GB,
            4.0 * TB,
            148 * TFLOPS,
            296 * TFLOPS,
            0.0,
            78,
            450 * GB,
            8,
            50 * GB,
            8,
            "HBM, FLOP/s, NVLink: LMSYS/Ant 2025-09-26 and InferSim (NICs of 25 to 50 GB/s per GPU"
            " are sold)",
            is_power_limited=False,
        ),
        Hardware(
            "h100",
            80 * GB,
            3.35 * TB,
            989 * TFLOPS,
            1979 * TFLOPS,
            0.0,
            132,
            450 * GB,
            8,
            50 * GB,
            8,
            "NVIDIA data sheet (dense figures) and AIConfigurator's h100_sxm",
        ),
        Hardware(
            "h200",
            141 * GB,
            4.8 * TB,
            989 * TFLOPS,
            1979 * TFLOPS,
            0.0,
            132,
            450 * GB,
            8,
            50 * GB,
            8,
            "NVIDIA data sheet and AIConfigurator's h200_sxm",
        ),
        Hardware(
            "b200",
            180 * GB,
            7.7 * TB,
            2250 * TFLOPS,
            4500 * TFLOPS,
            9000 * TFLOPS,
            148,
            900 * GB,
            8,
            50 * GB,
            8,
            "AIConfigurator's b200_sxm; NIC 50 GB/s (CX7; CX8 has 100); 148 SMs: NVIDIA Blackwell",
        ),
        Hardware(
            "gb200",
            189 * GB,
            8.0 * TB,
            2500 * TFLOPS,
            5000 * TFLOPS,
            10000 * TFLOPS,
            152,
            900 * GB,
            72,
            100 * GB,
            4,
            "AIConfigurator's gb200 (NVL72: one NVLink domain of 72, 4 GPUs a tray); 152 SMs:"
            " NVIDIA Blackwell",
        ),
    )
}


def hardware_named(name: str) -> Hardware:
    """Return a row of HARDWARE. Raises ValueError that lists the known names."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise ValueError(f"hardware {name!r} is unknown; use one of {', '.join(HARDWARE)}.")
    return found
