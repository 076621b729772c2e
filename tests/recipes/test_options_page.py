"""The page of options is made of the options."""

import options_page


def test_the_page_is_that_of_the_options_as_they_are():
    assert options_page.PAGE.read_text() == options_page.page(), "run python recipes/options_page.py"
