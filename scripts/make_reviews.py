"""Makes the film reviews that ship with distlaunch, from the source distribution of vaderSentiment 3.3.2.

    python scripts/make_reviews.py movieReviewSnippets_GroundTruth.txt

The file is in additional_resources/hutto_ICWSM_2014.tar.gz of that distribution: id, mean rating from -4 to 4, text.
Keeps the reviews with a clear rating, |rating| >= 1, in a shuffled order that is always the same.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np

from distlaunch.workloads.sentiment import SHIPPED


def main(source: str) -> None:
    rows = [line.split("\t", 2) for line in Path(source).read_text(encoding="latin-1").splitlines()]
    clear = [(int(float(rating) > 0), " ".join(text.split())) for _, rating, text in rows if abs(float(rating)) >= 1]
    order = np.random.default_rng(0).permutation(len(clear))
    lines = "".join(f"{clear[index][0]}\t{clear[index][1]}\n" for index in order)
    SHIPPED.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))
    print(f"{SHIPPED}: {len(clear)} reviews, {SHIPPED.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1])
