"""Log records carry the rank."""

import logging


def test_records_of_any_logger(strategy, caplog):
    for name in ("mpistrat", "mpistrat.data", "a.program.of.its.own"):
        logging.getLogger(name).warning("hello %s", "there")
    found = [(record.rank, record.size, record.getMessage()) for record in caplog.records]
    assert found == [(strategy.comm.rank, strategy.comm.size, "hello there")] * 3
    assert logging.Formatter("%(rank)d: %(message)s").format(caplog.records[0]) == f"{strategy.comm.rank}: hello there"
