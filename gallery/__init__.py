"""What a person uses: data sets, the command `zoo`, and the demonstration that it runs."""

__all__: list[str] = []
