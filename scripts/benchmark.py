"""OGC's benchmark on the nets of its table: ``python scripts/benchmark.py --arch resnet101 --device cuda:0``."""

from monet_like.__main__ import benchmark_main

if __name__ == "__main__":
    benchmark_main()
