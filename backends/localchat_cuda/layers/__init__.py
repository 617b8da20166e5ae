"""Operations of decoder layers, with which architectures are written."""
