"""Who only waits for answers of Celery's remote control, as Flower does, leaves the fleet's work alone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kombu import Consumer, Queue

from common.broker import make_app

if TYPE_CHECKING:
    from tests.servers import BrokerServer

ANSWERS = "0123.reply.celery.pidbox"


def test_answers_are_no_leases_and_waiting_for_them_sweeps_nothing(broker_server: BrokerServer) -> None:
    """Many answers come at once, one per worker; nobody acknowledges them."""
    client = broker_server.client
    client.delete("unacked", "unacked_index", "unacked_swept")
    client.hset("unacked", "dead", '[{"body": "x"}, "", "gpu"]')
    client.zadd("unacked_index", {"dead": 1.0})
    app = make_app(broker_server.url)
    app.conf.broker_transport_options["unacked_restore_interval"] = 1.0  # sweeps would come soon
    got: list[Any] = []
    queue = Queue(ANSWERS, auto_delete=True, durable=False)
    with app.connection() as connection, connection.channel() as channel:
        with connection.Producer(channel) as producer:
            queue(channel).declare()
            for number in range(5):
                producer.publish({"number": number}, routing_key=ANSWERS, exchange="")
        consumer = Consumer(channel, [queue], callbacks=[lambda body, _: got.append(body)], no_ack=True)
        with consumer:
            with suppress(TimeoutError):
                while True:
                    connection.drain_events(timeout=1)
            channel.qos.restore_visible()  # as kombu calls it now and then
    app.close()
    leases = client.zrange("unacked_index", 0, -1)
    entries = client.hkeys("unacked")
    swept = client.exists("unacked_swept")
    client.delete("unacked", "unacked_index", "gpu")

    assert sorted(each["number"] for each in got) == [0, 1, 2, 3, 4]
    assert (leases, entries) == ([b"dead"], [b"dead"])
    assert not swept, "a sweep came by"
