"""Limits of the pictures and recordings of a request. They bound the memory of decoding."""

from typing import Final

MAX_ATTACHMENTS: Final = 32
"""Pictures and recordings in the whole conversation of a request."""
MAX_FILE_BYTES: Final = 32_000_000
"""Largest encoded file."""
MAX_TOTAL_BYTES: Final = 96_000_000
"""All encoded files of a request together."""
MAX_PIXELS: Final = 50_000_000
"""Pixels of a picture, which needs up to 12 bytes each while it is decoded. Phones take 48 million."""
MAX_PICTURE_READS: Final = 50_000
"""Reads from the file of a picture, which take 0.1 s. Large photos take some hundred."""
MAX_READ_RATIO: Final = 4
"""Bytes that are read from the file of a picture, per byte of the file."""
MAX_PROFILES: Final = 4
"""Color profiles, and parts of EXIF data, of a picture. Programs write one."""
MAX_EXIF_BYTES: Final = 200_000
"""Longest EXIF data, without its thumbnail some kB, from which the orientation is read."""
MAX_TAG_VALUES: Final = 200_000
"""Values of a tag of a TIFF file. The largest color table has 196,608."""
MAX_SCANNED_PIXELS: Final = 2_000_000_000
"""Pixels of a JPEG picture times its scans. Progressive photos have about ten scans."""
MAX_SIDE_RATIO: Final = 200
"""Ratio of the longer to the shorter side. Image encoders reject more."""
MIN_AUDIO_S: Final = 0.1
"""Shortest recording. llama.cpp aborts on a sample, or reads past the end of a short one."""
MAX_AUDIO_S: Final = 1800
"""Seconds of a recording. At 16 kHz, half an hour has 115 MB."""
MAX_CHANNELS: Final = 8
MIN_AUDIO_RATE: Final = 1_000
MAX_AUDIO_RATE: Final = 192_000
"""Samples per second of a recording, per channel. A rate of 1 would give 16,000 samples for each byte."""
MAX_SAMPLES: Final = 180_000_000
"""Samples of all channels of a recording: half an hour of stereo at 48 kHz. Silence takes few bytes."""
