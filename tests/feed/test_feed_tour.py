"""The tour through the feed's promises ends well."""

from examples.feed_tour import main


def test_every_way_through_the_epoch_gives_the_same_bytes(capsys):
    main(num_pictures=32)
    told = capsys.readouterr().out
    assert "The same bytes every time" in told
    assert "killed after batch 1, and replaced" in told
