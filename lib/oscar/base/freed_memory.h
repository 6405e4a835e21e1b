// What malloc keeps of freed memory, given back to the system.
#pragma once

namespace oscar {

// All of it: a call walks the heap, and what is asked for next is mapped anew.
void give_back_freed_memory();

// Only where much is kept (kMuchKept). Called after each step of work whose memory is planned to
// the byte, it bounds what a process has beyond what it uses, and costs a run 5% of its time; to
// give back all costs a quarter.
void give_back_much_freed_memory();

}  // namespace oscar
