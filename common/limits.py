"""Every bound that is not a flag, named, in one place.

Decides what "too many" means; read by both nodes, the transport and the client. Nothing here may be changed
at run time: whoever needs another value needs a flag. The answer at each limit stands beside it.
"""

from typing import Final

CONTROL_MESSAGE_BYTES: Final = 8 * 2**20  # the socket drops larger messages, and the peer with them
PROMPT_CHARACTERS: Final = 1_000_000  # tokenising longer texts would hold up everybody's text for seconds
TOKENIZE_REQUESTS: Final = 16  # of all clients under way; further ones are answered BUSY
LABEL_CHARACTERS: Final = 256  # longer labels are a bad message
DETAIL_CHARACTERS: Final = 2_000  # longer error texts are cut by the sender
SESSIONS: Final = 1_024  # of clients; their further HELLOs are refused as temporary
DECODE_SESSIONS: Final = 64  # likewise of decode nodes, so that clients cannot lock them out
JOBS_PER_CLIENT: Final = 4_096  # further SUBMITs are answered BUSY
OUTBOX_MESSAGES: Final = 4_096  # one more ends that peer's session
HIGH_WATER_MARK_MESSAGES: Final = 1_000  # further sends wait in the outbox
UNREAD_MESSAGES: Final = 64  # of one peer, at a node's socket; its further ones wait on its own side
BAD_MESSAGES_PER_CLIENT: Final = 5  # one more ends the client's session
RECEIVE_BATCH_MESSAGES: Final = 256  # the rest waits for the next turn of the loop
RECEIVE_BATCH_BYTES: Final = 2**20  # the message that reaches it is the last of its turn
MESSAGE_FRAMES: Final = 8  # the codec wants 3; the rest of a longer message is thrown away unread
MESSAGE_ITEMS: Final = 2**20  # in one array of a message; more is a bad message
MESSAGE_CONTAINERS: Final = 16_384  # maps and arrays in a message; more is a bad message
MESSAGE_MAP_ITEMS: Final = 4_096  # in one map of a message; more is a bad message
ALLOWED_KEYS: Final = 4_096  # a longer list of who may connect is refused
KEY_FILE_BYTES: Final = 2**20  # larger files are refused
EPOCH_STEP: Final = 2**20  # a PREFILL with an epoch further ahead ends the session
EPOCH: Final = 2**62  # a greater one is a bad message
MAILBOX_ITEMS: Final = 65_536  # between threads; one more is a bug of ours
MAILBOX_BATCH_ITEMS: Final = 256  # the rest waits for the next turn of the loop, behind what peers sent
SOURCE_SLOTS: Final = 1_024  # more are a wrong flag; a slot's number beyond is a bad message
IPC_PATH_BYTES: Final = 107  # sockaddr_un
CONFIG_FILE_BYTES: Final = 2**20  # larger files are refused
KV_PIECE_BYTES: Final = 2**20  # of KV in one message, one layer of one token at least
KV_CREDIT_BYTES: Final = 8 * 2**20  # of KV on its way to a decode node, beyond its landing buffers
KV_UNREAD_MESSAGES: Final = 32  # pieces at a decode node's socket; further ones wait at the prefill node
KV_MOVED_MS: Final = 100  # how often pieces on their way count as progress
KV_BATCH_MESSAGES: Final = 8  # pieces taken in one turn of the loop
OUTBOX_RETRY_MS: Final = 5
LET_GO_RETRY_MS: Final = 1  # while sent KV is not known to have left our memory
STEPS_PER_CHECK: Final = 64  # a daemon checks its invariants every so many steps
ORPHAN_GRACE_MS: Final = 1_000  # scheduling noise granted to a producer that was told to stop
LAST_WORDS_MS: Final = 1_000  # a node that goes drops what its peers have not taken by then
PAUSE_MS: Final = 250  # a loop that comes back later than this does not charge its peers for it
