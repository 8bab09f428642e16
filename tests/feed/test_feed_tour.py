"""The example that demonstrates the feed's guarantees runs without errors."""

from examples.feed_tour import main


def test_every_pass_over_the_epoch_gives_the_same_bytes(capsys):
    main(num_pictures=32)
    output = capsys.readouterr().out
    assert "The same bytes every time" in output
    assert "killed after batch 1, and replaced" in output
