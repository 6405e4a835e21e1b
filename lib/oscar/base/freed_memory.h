// What malloc keeps of freed memory, given back to the system.
#pragma once

namespace oscar {

// All of it: a call walks the heap, and what is asked for next is mapped anew.
void give_back_freed_memory();

// Only where much is kept (kMuchKept). Called before each step of work whose memory is planned, it
// bounds what a process has beyond what it uses, for some 3 to 8% of its time.
void give_back_much_freed_memory();

}  // namespace oscar
